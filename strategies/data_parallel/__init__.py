"""The data axis: ranks that hold the same model and see different batches."""
