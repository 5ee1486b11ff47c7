"""The ranks of a job: their connections, what they agree on, how they fail, their devices.

Every wing on which several ranks meet enters it. It may import none.
"""
