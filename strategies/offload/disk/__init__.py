"""Offloaded state on a local disk: one unnamed file per rank, read and written ahead of its use.

``swap_file`` allocates the file and adds a checksum to each block, ``transfer`` moves blocks on
threads. ``state_store`` (optimizer state, in a ring of buffers) and ``param_store`` (parameter
shards, in the order of the last step) are the stores that ``offload/stores.py`` opens.
``preflight`` measures the disk before training.
"""
