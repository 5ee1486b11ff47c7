"""`layout=`: tensors that are parts of a whole, as the caller says."""
