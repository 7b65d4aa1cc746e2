"""Runs a module's own step as one stage, with received values in place of other stages' results.

``units`` finds the modules that a stage runs as a whole. ``trace_step`` runs the step once on fake
tensors: ``fake_unit`` finds the outputs of units, ``trace_mode`` records the code between them,
``data_dependent_ops`` handles reads of values, and ``trace`` is the result. ``cut`` divides a trace
into stages, ``stage_run`` runs the step as one of them, with absent parameters in place of other
stages' and ``rng`` for equal random numbers. ``plan_cache`` keeps the result for each batch
signature.
"""
