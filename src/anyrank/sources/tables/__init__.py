"""Which table of a checkpoint holds the weights, and the keys that `rename=` makes of its keys."""
