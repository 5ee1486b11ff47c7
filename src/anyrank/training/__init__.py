"""Steps over data: which samples, in which order, with which random numbers and gradients.

A script's loop and `runs` enter it. It may import `models`, `world`, `files` and `tensors`.
"""
