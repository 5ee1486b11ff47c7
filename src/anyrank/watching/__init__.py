"""Observes a job: `watch`, `check`, and which rank is slow.

It may import `training` and the wings below.
"""
