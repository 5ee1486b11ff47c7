"""Steps over data: which samples, in which order, with which random numbers and gradients.

The entry points are a script's loop and `runs`. It may import `models`, `world`, `files` and
`tensors`.
"""
