"""Observe a job: `watch`, `check`, and the search for slow ranks.

The entry points are `watch`, `check`, and the modules that `cli` runs. May import `training`,
`live`, `loading` and the wings that these may import.
"""
