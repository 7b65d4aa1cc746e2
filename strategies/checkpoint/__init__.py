"""Checkpoints that are complete or absent: one file, or a directory of shards.

A strategy whose ranks hold the whole model writes one file, Lightning's own. One whose ranks hold
shards writes a directory, in the format of ``torch.distributed.checkpoint``, where everything is
found by the name of its parameter, so that any layout reads what any other has written::

    epoch=0-step=10.ckpt/
        __0_0.distcp     the shards that rank 0 has written; one such file per rank
        .metadata        which piece of which tensor lies where
        meta.pt          the rest: loops, callbacks, schedulers, hyper-parameters, random states
        manifest.json    written last; names the others with their sizes

Both are written beside their final name and renamed. On file systems that cannot rename, a
directory becomes complete by its manifest, see ``folders``.
"""
