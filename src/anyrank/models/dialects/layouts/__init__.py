"""`layout=`: tensors that the caller declares to be parts of a global tensor."""
