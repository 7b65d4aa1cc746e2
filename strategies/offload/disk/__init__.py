"""Offloaded state on a local disk: one unnamed file per rank, read and written ahead of its use."""
