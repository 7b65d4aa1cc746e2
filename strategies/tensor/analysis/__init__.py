"""Finds the dims of a model that can be divided, from one step on fake tensors.

``analyse`` runs the step under a dispatch mode. For every operator, a rule states which dims of
its inputs and outputs correspond and which it needs whole (``arithmetic_rules``, also attention;
``movement_rules``: views, lookups, split and concatenate). ``symbolic_dims`` merges dims that
correspond, and ``trace`` records what was done to them. ``tensor/candidates.py`` reads the result.
"""
