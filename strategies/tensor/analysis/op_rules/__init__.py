"""What operators of torch do to the axes of tensors, a family in each module."""
