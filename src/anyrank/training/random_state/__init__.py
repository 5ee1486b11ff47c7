"""Seeds, and the state of the random generators that a step uses."""
