"""The order in which the ranks of a pipeline compute and communicate.

``boltmesh.schedule_sim`` has the actions, their grammar and the simulator, for the dashboard too.
``registry`` knows the schedules and the sizes they have, and gives a checked order and the least
bubble; each module in ``orders/`` registers the schedules of one family. ``actions`` adds sends and
receives and gives one rank its list, which ``pipeline/runtime`` runs.
"""
