"""Nested values as JSON plus tensors, and back: no pickle, no type lost, nothing guessed.

What JSON has goes as it is. Tuples, sets, tables with other keys, dtypes, bytes, NaN and infinities
become a table of one entry whose key starts with "~". Anything else is refused when it is saved.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from anyrank.errors import CheckpointError

Put = Callable[[str, torch.Tensor], Any]
Take = Callable[[Any], Any]
MARK = "~"


def to_json(value: Any, where: str, put: Put) -> Any:
    """A value as JSON.

    Args:
        value: tables, sequences and plain values, nested.
        where: its key, for errors and tensors' names.
        put: called with each tensor's key; returns the JSON that stands for it.

    Raises:
        CheckpointError: a value of another type; names its key.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        return put(where, value)
    if isinstance(value, float):
        plain = float(value)
        return plain if math.isfinite(plain) else {"~float": repr(plain)}
    if isinstance(value, Mapping):
        return _table(cast("Mapping[Any, Any]", value), where, put)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(cast("list[Any]", value), where, put)
    if isinstance(value, torch.dtype):
        return {"~dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"~device": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"~bytes": base64.b64encode(value).decode()}
    if type(value).__module__ == "numpy":
        return _numpy(value, where, put)
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved: a "
        "checkpoint holds tensors and plain values (numbers, text, None, lists, tuples, tables); "
        "convert it in the object's state_dict() and load_state_dict()"
    )


def _table(value: Mapping[Any, Any], where: str, put: Put) -> Any:
    if all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: to_json(item, f"{where}.{key}", put) for key, item in value.items()}
    pairs = [
        [to_json(key, f"{where} key {key!r}", put), to_json(item, f"{where}.{key}", put)]
        for key, item in value.items()
    ]
    return {"~table": pairs}


def _sequence(value: Any, where: str, put: Put) -> Any:
    kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k))
    ordered = value if kind in (list, tuple) else sorted(value, key=repr)
    items = [to_json(item, f"{where}.{number}", put) for number, item in enumerate(ordered)]
    return items if kind is list else {f"~{kind.__name__}": items}


def _numpy(value: Any, where: str, put: Put) -> Any:
    """Arrays as tensors; numpy's numbers as Python's."""
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        return to_json(value.item(), where, put)
    try:
        return {"~array": put(where, torch.from_numpy(value.copy()))}
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: {error}: convert it to a plain array") from error


def from_json(value: Any, take: Take) -> Any:
    """The value that `to_json` was given; `take` turns what stands for a tensor into one.

    Raises:
        CheckpointError: a mark of a newer format.
    """
    if isinstance(value, list):
        return [from_json(item, take) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    mark = next(iter(table), "")
    if not mark.startswith(MARK):
        return {key: from_json(item, take) for key, item in table.items()}
    inner = table[mark]
    if mark == "~table":
        return {from_json(key, take): from_json(item, take) for key, item in inner}
    if mark in ("~tuple", "~set", "~frozenset"):
        made = [from_json(item, take) for item in inner]
        return {"~tuple": tuple, "~set": set, "~frozenset": frozenset}[mark](made)
    if mark == "~array":
        return from_json(inner, take).numpy()
    plain: dict[str, Callable[[str], Any]] = {
        "~float": float,
        "~dtype": lambda name: getattr(torch, name),
        "~device": torch.device,
        "~bytes": base64.b64decode,
    }
    return plain[mark](inner) if mark in plain else take(table)


def marks(value: Any, name: str) -> list[Any]:
    """What stands under a mark anywhere in the JSON of a value, in order."""
    found: list[Any] = []

    def see(table: Any) -> Any:
        if name in table:
            found.append(table[name])
        return torch.zeros(())

    from_json(value, see)
    return found
