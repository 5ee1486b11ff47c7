"""The changes that libraries make to a torch model: its names, its files, its values.

The matcher asks each dialect that applies the same questions; `dialect.py` lists them.
"""
