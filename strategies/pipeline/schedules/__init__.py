"""The order of a pipeline's work.

``registry`` names the schedules and the sizes they exist in, ``orders`` works the order out,
``actions`` gives one rank its part of it, ``bubble`` simulates a step and states what it costs.
"""
