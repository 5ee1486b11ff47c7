"""One reader per format: it lists the tensors that a file or a folder holds."""
