"""`convert`: write weights to files of a different format."""
