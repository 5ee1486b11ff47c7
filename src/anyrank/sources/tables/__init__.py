"""Which table of a checkpoint holds the weights, and how `rename=` changes keys."""
