"""One save, from the state to the rename that commits it."""
