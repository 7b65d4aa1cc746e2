"""Deferred initialization: constructs a model without its memory, materializes it by units.

``deferred`` has the public ``deferred_init`` context. Inside it, a dispatch mode sees every
operator: large new tensors go to ``meta``, and operators on them are appended to a ``recording``.
``materialize`` replays the recording for one unit, on the device, with the values of the first
rank.

The data axis calls ``prepare_unit`` before it shards a unit, the pipeline ``prepare_modules`` for
the modules of its stages. torchdistX has a ``deferred_init`` for the same purpose.
"""
