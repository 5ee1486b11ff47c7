"""Observes a job: `watch`, `check`, and which rank is slow.

A script enters it by `watch`, and `cli`. It may import `training`, `live`, `loading` and the wings
that these may import.
"""
