"""The samples of a step and their order, and how a worker process delivers them."""
