"""Reads that ranks share: one rank reads bytes, and passes them on to the ranks that need them."""
