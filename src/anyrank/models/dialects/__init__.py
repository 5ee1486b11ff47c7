"""What libraries change in torch models: names, files and values.

The matcher asks each applicable dialect the same questions, which `dialect.py` lists.
"""
