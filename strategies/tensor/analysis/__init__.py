"""Finds what can be divided, from one forward pass on tensors without storage."""
