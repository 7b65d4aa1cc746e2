"""``boltmesh plan`` and ``schedule``: memory, stages and traffic of one layout before it runs.

``planner`` and ``advisor`` search among layouts.

``command`` chooses a plan by the config's strategy (``strategy_options``) and prints it (``text``).
``dry_model`` builds the model from fake tensors and runs one step (``dry_step``). From that
``stage_plan`` (``stage_model``) plans a pipeline, ``tensor_plan`` the tensor axis, ``context_plan``
a divided sequence, ``expert_plan`` experts, and ``mesh_plan`` (``mesh_model``, ``mesh_rank``,
``mesh_stage``) all axes. The arithmetic is in ``strategies/cost_model``. ``schedule`` draws one
step of a pipeline schedule.
"""
