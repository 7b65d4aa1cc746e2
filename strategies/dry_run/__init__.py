"""What it takes to run a user's step beside the run: a batch, sameness on all ranks, no trace."""
