"""A run that starts from a checkpoint of another tool."""
