"""Checkpoints of runs of other tools: the names of their parts, and where each is."""
