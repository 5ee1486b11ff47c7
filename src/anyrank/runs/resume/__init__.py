"""`Checkpoints`: the loop, when to save, the resume."""
