"""Whether a layout computes what one process computes: two runs side by side, compared."""
