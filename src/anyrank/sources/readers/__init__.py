"""One reader per format, which lists the tensors in a file or folder."""
