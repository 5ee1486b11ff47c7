"""`exact=True`: the same bits on any number of ranks."""
