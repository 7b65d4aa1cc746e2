"""A job's figures for other programs: Prometheus and CSV."""
