"""Layers that are too large to be gathered whole, run in tiles."""
