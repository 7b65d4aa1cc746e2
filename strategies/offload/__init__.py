"""Optimizer state and parameters outside of the compute device: in host memory or on a disk."""
