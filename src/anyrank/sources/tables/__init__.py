"""The choice of the table of weights in a checkpoint, and the keys that `rename=` makes."""
