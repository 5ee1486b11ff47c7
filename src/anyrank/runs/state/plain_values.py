"""Values that a manifest can keep: numbers, text, and lists and dicts of these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

ABSENT = object()  # stands for a value that is not plain
MOST = 256  # maximum number of values of a setting; a longer list is data of the run


def as_json(initial: Any) -> Any:
    """Return settings as they come back from a manifest: values that are not plain are omitted."""
    value = plain(initial)
    return value if value is not ABSENT else {}


def plain(value: Any) -> Any:
    """Return a value as JSON; ABSENT if it has no such form, or is a long list."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.is_meta
        return plain(value.item()) if is_number else ABSENT
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(value)
    if isinstance(value, Counter):  # milestones
        return plain(sorted(cast("Counter[Any]", value).elements()))
    if isinstance(value, Mapping):
        rows = [(str(k), plain(v)) for k, v in cast("Mapping[Any, Any]", value).items()]
        return {key: item for key, item in rows if item is not ABSENT}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in cast("Sequence[Any]", value)]
        return ABSENT if len(items) > MOST else [i for i in items if i is not ABSENT]
    return ABSENT
