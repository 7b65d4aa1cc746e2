"""The one engine under every strategy, in layers: each file adds one thing to the one before.

``hooks`` (what axes answer), ``checkpointing``, ``rank_mesh`` (ranks and groups), ``loops`` (what
runs in a step), ``mesh_strategy`` (setting up and ending: the whole of ``MeshStrategy``). Where
ranks share batches ``shared_batch`` stands on these, and on it ``tensor_mesh`` and
``pipeline_mesh``, whose checkpoints and loops are in files of their own.
"""

from boltmesh.strategies.engine.strategy import MeshStrategy as MeshStrategy
