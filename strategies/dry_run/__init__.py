"""Dry runs: a user's step run before or beside training, without side effects.

``sample`` takes a batch from the loaders without moving them. ``step`` runs the module's own step
on it and collects loss, gradients and block outputs, which ``comparison`` compares;
``no_side_effects`` restores attributes, buffers and random states, ``metrics`` replaces calls of
metrics, ``fake_optimizers`` replaces optimizers that do not exist yet. ``batch_check`` compares
the batches of ranks that share a model. ``unsupported`` refuses steps and parameters that no axis
can handle.

The pipeline's trace and loss check and the tensor axis's planning and verification call these; the
engine calls ``batch_check`` and ``metrics`` during training.
"""
