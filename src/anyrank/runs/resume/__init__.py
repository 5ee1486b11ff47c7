"""`Checkpoints`: the loop over the steps, when to save, and the resume."""
