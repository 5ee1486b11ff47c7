"""The origins of weights: files, folders, runs and other tools' checkpoints; without a model.

`loading`, `live`, `runs` and `tools` enter it. It may import `tensors` and `files`.
"""
