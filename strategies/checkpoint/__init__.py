"""Checkpoints that are complete or absent: one file, or a directory of shards.

A strategy whose ranks hold the full model writes one file in Lightning's format (``file``). Others
write a directory in the format of ``torch.distributed.checkpoint`` (``directory``), in which
tensors are found by the names of parameters, so that any layout reads what any other has written::

    epoch=0-step=10.ckpt/
        __0_0.distcp     the shards written by rank 0; one such file per rank
        .metadata        which piece of which tensor is in which file
        meta.pt          the rest: loops, callbacks, schedulers, hyper-parameters, random states
        manifest.json    written last; names the others with their sizes

``directory`` calls ``shard_writer`` and ``shard_reader``, which handle ``chunks`` (a rank's part of
a tensor); ``optimizer_state`` names optimizer state by parameter; ``manifest`` completes a
directory and checks one; ``storage`` writes to disks and fsspec. ``async_save`` writes in a thread.
``host_part`` writes the state of one host's ranks and sends it to another host; ``host_memory``
has its paths there. ``safe_load`` is the only module that unpickles. The engine's ``checkpointing``
and ``memory_checkpoints`` call all of these.

Both forms are written under a temporary name and renamed (``atomic_replace``). On file systems that
cannot rename, the manifest completes a directory, see ``storage``.
"""
