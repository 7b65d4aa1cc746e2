"""The screens of a job as plain Python: which panels they have, and where these stand."""
