"""The panels of the dashboard, one per file; each paints what a function of ``drawing`` gives."""
