"""The ranks of a job: how they connect, agree and fail, and which devices they have.

Every wing in which several ranks meet imports it. It may import no other wing.
"""
