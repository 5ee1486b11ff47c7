"""A run that begins from a checkpoint of another tool."""
