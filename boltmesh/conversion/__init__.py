"""Converts checkpoints for other programs and back: plain Lightning files, and safetensors.

``export_checkpoint`` and ``import_checkpoint`` are the commands. ``source`` opens a checkpoint of
any layout without loading it, ``safetensors_files`` reads and writes that format, under the names
of files on the Hub too; ``writing`` makes the result complete or absent. All go tensor by tensor,
so the memory used is that of the largest.
"""
