"""`Checkpoints`: what a run saves, when, and how it is resumed.

The entry points for a script are `TrainState` and `Checkpoints`. It may import `training`, `live`,
`loading` and the wings that these may import.
"""
