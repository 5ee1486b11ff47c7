"""The parts of a run: how each is saved and restored."""
