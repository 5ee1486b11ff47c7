"""`inspect`, `verify` and `diff`: list a checkpoint, check it, compare two."""
