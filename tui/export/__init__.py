"""A job for other programs: Prometheus text, CSV tables, an HTML page."""
