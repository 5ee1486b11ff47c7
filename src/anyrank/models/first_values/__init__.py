"""Initial values of tensors that no source has; the same on any number of ranks."""
