"""``boltmesh bench``: the same model and data under several strategies, in one table.

Each strategy is a job of its own, started as ``boltmesh fit`` starts it; its figures are those that
the job's telemetry has measured. Nothing here loads torch.
"""
