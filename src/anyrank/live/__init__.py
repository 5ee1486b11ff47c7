"""Weights of a live model into another one, in another layout: `sync`.

A script enters it by `sync`, and `load` where its source is live. It may import `loading` and the
wings that `loading` may import.
"""
