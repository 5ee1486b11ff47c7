"""Weights of a live model into another one, in another layout: `sync`.

It may import `loading` and the wings below it.
"""
