"""Which samples a step has, in which order, and how a worker process brings them."""
