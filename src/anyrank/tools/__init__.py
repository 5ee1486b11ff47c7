"""Commands on checkpoints: `convert`, `inspect`, `diff`, `verify`. They run in one process, but for
`convert` of a live model, which all ranks call.

A script or `cli` enters it. It may import `runs`, `live`, `loading` and what these may import, but
not `training`.
"""
