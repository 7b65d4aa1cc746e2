"""Orders in which the ranks of a pipeline compute and communicate.

``boltmesh.schedule_sim`` has the actions, their grammar and the simulator, for the dashboard too.
``registry`` has the schedules and their sizes, checked orders and ideal bubbles; each module in
``orders/`` registers the schedules of one family. ``actions`` adds sends and receives and makes the
list of one rank, which ``pipeline/runtime`` runs.
"""
