"""Runs that other tools have saved: the names of their parts, and the place of each."""
