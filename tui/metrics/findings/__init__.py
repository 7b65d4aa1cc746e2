"""What may hold a job back: one file for each kind of reason, all of them pure."""
