"""Commands on checkpoints, in one process: `convert`, `inspect`, `diff`, `verify`.

It may import `runs` and the wings below.
"""
