"""Converts checkpoints for other programs and back: plain Lightning files, and safetensors.

``export_checkpoint`` and ``import_checkpoint`` are the commands. ``source`` opens a checkpoint of
any layout without loading it, ``lightning_file`` and ``safetensors_files`` read and write the
formats tensor by tensor, ``writing`` makes the result complete or absent. The memory used is that
of the largest tensor.
"""
