"""``boltmesh bench``: the same model and data under several strategies, measured, in one table.

``command`` reads the strategies (``variant``), runs each as a ``job`` of its own, started as
``boltmesh fit`` starts it, and prints the table. ``measurement`` computes its numbers from the
job's telemetry. Nothing here loads torch.
"""
