"""Put weights into a model: read them, pass them on between ranks, put them in place, verify.

Scripts, and the wings `live`, `runs` and `tools`, enter it by `load`, `plan` and `materialize`.
It may import `models`, `sources`, `world`, `files` and `tensors`.
"""
