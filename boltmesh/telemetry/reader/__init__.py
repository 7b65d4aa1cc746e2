"""How anybody reads a job's files; no torch."""
