"""Fit a step into device memory, with every gradient hook firing exactly once.

Everything here records into the graph that the caller's backward pass walks: nothing starts a
backward pass of its own on parameters, writes to `.grad`, or knows what wraps the model. A script
enters it by `recompute`, `offload`, `tile` and `tiled_loss`. It may import `training`, `world`,
`files` and `tensors`.
"""
