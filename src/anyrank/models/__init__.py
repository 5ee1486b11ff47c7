"""One rank's model: its tensors, and what of a source fills them.

`loading`, `live`, `training` and `runs` enter it. It may import `sources` and the wings below.
"""
