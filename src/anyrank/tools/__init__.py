"""Commands on checkpoints: `convert`, `inspect`, `diff`, `verify`.

They run in one process, except for `convert` of a live model, which is collective. A script or
`cli` calls them. May import `runs`, `live`, `loading` and what these may import, but not
`training`.
"""
