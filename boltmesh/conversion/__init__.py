"""Checkpoints from and for other programs: plain Lightning's files, and safetensors.

Both ways go tensor by tensor: the memory that is taken is that of the largest one, however large
the model is. What is written is complete or absent, as all checkpoints are.
"""
