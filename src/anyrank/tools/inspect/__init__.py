"""`inspect`, `verify` and `diff`: list a checkpoint, check that it is whole, compare two."""
