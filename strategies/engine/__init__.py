"""The engine under every strategy: one strategy class, and one object per axis of the mesh.

    ddp.py, zero.py, ...     the public strategies: arguments, refusals, which axes
    {data_parallel,pipeline,tensor}/axis.py     the axes: subclasses of ``Axis``
    engine/
        strategy.py          MeshStrategy: set-up, checkpoints, ending
        loops.py             LoopStrategy: the loops, steps and clipping
        groups.py            RankMeshStrategy: axes, coordinates, process groups, starting ranks
        axis.py, data_axis.py    the interfaces of an axis and of the data axis
        checkpointing.py     Checkpointing: saves and loads this rank's state
        memory_checkpoints.py    MemoryCheckpoints: copies of checkpoints in the memory of hosts
        resume.py            ResumeManager: random states and positions in the data

``MeshStrategy`` inherits from ``LoopStrategy``, that from ``RankMeshStrategy``, that from
Lightning's ``ParallelStrategy``; everything else is an object that one of them has. Each Lightning
hook goes through ``self.axes``. No file here imports an axis.

One run, in the order of the calls:

1. ``MeshStrategy(axes=[...])`` puts the axes in the order of ``AXES``: ``Axis.attach``.
2. The Trainer needs the layout: ``choose_layout``, ``Axis.check_layout``. Ranks start.
3. ``setup_environment``: one process group per axis, ``Axis.build_groups``; telemetry opens.
4. ``setup``: ``Axis.refuse``; ranks that share batches take over the first one's generators;
   ``Axis.place``, the tensor axis before the pipeline, whose stages are made of divided layers;
   precision, device; ``DataAxis.wrap`` makes replicas or shards of what is left; the optimizers;
   expected traffic and memory are recorded; ``Axis.start``.
5. A batch: ``Axis.announce_batch`` as it is transferred; ``Axis.run_step``, each axis around the
   inner ones; the backward pass, in which the data axis reduces gradients; ``Axis.norm_shares`` as
   they are clipped; ``DataAxis.after_optimizer_step``.
6. A checkpoint: ``Axis.holds``, ``stores`` and ``division`` give the part of a rank.
7. ``teardown``: ``Axis.close``, saves are completed, ``Axis.release``.
"""

from boltmesh.strategies.engine.strategy import MeshStrategy as MeshStrategy
