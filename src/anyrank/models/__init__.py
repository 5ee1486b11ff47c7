"""One rank's model: its tensors, and the parts of a source that fill them.

`loading`, `live`, `training` and `runs` enter it. It may import `sources` and the wings below.
"""
