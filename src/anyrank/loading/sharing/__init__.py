"""Bytes that one rank reads and passes on to the ranks that need them."""
