"""The exchange of gradients at a step's end, and their norm."""
