"""The parts of a run: what each saves, and what fills it again."""
