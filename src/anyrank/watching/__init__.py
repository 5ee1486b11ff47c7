"""A job from outside: `watch`, `check`, and which rank is slow.

It may import `training` and the wings below.
"""
