"""Where ranks run, what joins their devices, and which group of ranks a slow link holds up."""
