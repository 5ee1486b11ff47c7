"""`convert`: writes weights into files of another format."""
