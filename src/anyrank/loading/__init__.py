"""Puts weights into a model: read, pass on between ranks, put in place, verify.

A script enters it by `load`, `plan` and `materialize`; `live`, `runs` and `tools` do too. It may
import `models`, `sources`, `world`, `files` and `tensors`.
"""
