"""One rank's model: its tensors, and the parts of a source that fill them.

Every wing that knows a model enters it: `loading`, `live`, `runs`, `tools`, `watching`. It may
import `sources`, `world`, `files` and `tensors`.
"""
