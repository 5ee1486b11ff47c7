"""PEFT: adapters, their names and their values."""
