"""Sources of weights: files, folders, runs and other tools' checkpoints, without a model.

`models`, `loading`, `live`, `runs`, `tools` and `cli` import this wing. It may import `tensors` and
`files`.
"""
