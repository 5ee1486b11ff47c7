"""The ranks of a job: how they connect, agree and fail, and which devices they use.

Every wing in which ranks communicate imports this one. It may not import any other wing.
"""
