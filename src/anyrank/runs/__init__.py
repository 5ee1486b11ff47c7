"""`Checkpoints`: what a run saves, when, and how it is resumed.

A script enters it by `TrainState` and `Checkpoints`. It may import all wings below and `training`.
"""
