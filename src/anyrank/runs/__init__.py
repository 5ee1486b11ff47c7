"""`Checkpoints`: what a run saves, when, and how it is resumed.

A script enters it by `TrainState` and `Checkpoints`. It may import `training`, `live`, `loading`
and the wings that these may import.
"""
