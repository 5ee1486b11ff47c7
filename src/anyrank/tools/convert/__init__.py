"""`convert`: weights into files of another format."""
