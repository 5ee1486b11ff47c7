"""Fit a step into device memory, with every gradient hook firing exactly once.

All code here records into the graph of the caller's backward pass: nothing starts its own backward
pass on parameters, writes to `.grad`, or knows what wraps the model. Scripts enter it by
`recompute`, `offload`, `tile` and `tiled_loss`. It may import `training`, `world`, `files` and
`tensors`.
"""
