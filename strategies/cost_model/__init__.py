"""What a layout needs of memory, and what it moves, computed before anything is built. No torch."""
