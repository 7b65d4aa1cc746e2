"""What a model would need in a layout, before a rank is started: memory, stages, parts, bytes."""
