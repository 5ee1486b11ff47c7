"""Runs that other tools have saved: what each part of them is called, and where it lies."""
