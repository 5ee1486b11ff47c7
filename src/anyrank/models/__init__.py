"""One rank's model: its tensors, and the parts of a source that fill them.

The wings that handle models import this one: `loading`, `live`, `runs`, `tools`, `watching`. It may
import `sources`, `world`, `files` and `tensors`.
"""
