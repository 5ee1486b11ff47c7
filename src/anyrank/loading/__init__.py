"""Puts weights into a model: read, pass on between ranks, put in place, verify.

`load`, `plan`, `materialize` and a resume enter it. It may import `models` and the wings below.
"""
