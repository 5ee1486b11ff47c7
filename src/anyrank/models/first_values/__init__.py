"""Initial values of tensors that no file has, the same on any number of ranks."""
