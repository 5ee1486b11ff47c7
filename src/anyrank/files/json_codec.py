"""Nested values as JSON plus tensors, and back, without pickle and without losing types.

JSON's own types stay as they are. Tuples, sets, dicts with other keys, dtypes, bytes, NaN and
infinities become a dict of one entry whose key starts with "~". Any other value is an error when it
is saved.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.tensors.spec import StoredTensor, dtype_name

Put = Callable[[str, Any], Any]  # stores a tensor, or the position of its bytes
Take = Callable[[Any], Any]
MARK = "~"
DEEPEST = 100  # nested dicts and sequences; far below Python's recursion limit
SHOWN = 60  # characters of a key that is too long
DICTS: dict[type, str] = {
    dict: "~table",
    OrderedDict: "~ordered",
    Counter: "~counter",
    defaultdict: "~defaultdict",
}
SEQUENCES: dict[type, str] = {
    list: "",
    tuple: "~tuple",
    set: "~set",
    frozenset: "~frozenset",
    torch.Size: "~size",
}
FACTORIES: dict[str | None, Any] = {
    None: None,
    **{kind.__name__: kind for kind in (int, float, str, list, dict, set)},
}


@contextlib.contextmanager
def reading_record(where: str) -> Generator[None]:
    """Turn errors in the block, which reads JSON that a save wrote, into CorruptCheckpoint.

    Raises:
        CorruptCheckpoint: names `where`.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(
            f"{where}: is not valid anyrank data ({reason[:200]}). The file is corrupt; restore it "
            "from a copy, or use an older step."
        ) from error


def to_json(value: Any, where: str, put: Put, depth: int = 0) -> Any:
    """Return a value as JSON.

    Args:
        value: dicts, sequences and plain values, nested.
        where: its key, for errors and tensors' names.
        put: called with each tensor's key; returns the JSON that stands for it.
        depth: the number of dicts and sequences around it.

    Raises:
        CheckpointError: a value has a type that cannot be saved, or is nested too deep, such as one
            that contains itself; names its key.
    """
    if depth > DEEPEST:
        raise CheckpointError(
            f"{where[:SHOWN]}...: is nested more than {DEEPEST} levels deep, or contains itself, "
            "and cannot be saved. Return a flatter value from the object's state_dict()."
        )
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (torch.Tensor, StoredTensor)):
        return put(where, value)
    if isinstance(value, float):
        plain = float(value)
        return plain if math.isfinite(plain) else {"~float": repr(plain)}
    if type(value) in DICTS:  # exactly these: a subclass would be restored as its base
        return _dict(cast("Mapping[Any, Any]", value), where, put, depth + 1)
    if type(value) in SEQUENCES:
        return _sequence(cast("list[Any]", value), where, put, depth + 1)
    if isinstance(value, torch.dtype):
        return {"~dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"~device": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"~bytes": base64.b64encode(value).decode()}
    if isinstance(value, io.BytesIO):
        return {"~stream": base64.b64encode(value.getvalue()).decode()}
    if type(value).__module__ == "numpy":
        return _numpy(value, where, put)
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved. A "
        "checkpoint holds tensors and plain values (numbers, text, None, lists, tuples, dicts). "
        "Convert it in the object's state_dict() and load_state_dict()."
    )


def _dict(value: Mapping[Any, Any], where: str, put: Put, depth: int) -> Any:
    kind = DICTS[type(value)]
    plain = all(type(key) is str and not key.startswith(MARK) for key in value)
    if plain and kind == "~table":
        return {key: to_json(item, f"{where}.{key}", put, depth) for key, item in value.items()}
    pairs = [
        [
            to_json(key, f"{where} key {key!r}", put, depth),
            to_json(item, f"{where}.{key}", put, depth),
        ]
        for key, item in value.items()
    ]
    if isinstance(value, defaultdict):
        factory = cast("Any", value.default_factory)
        if factory not in FACTORIES.values():
            raise CheckpointError(
                f"{where}: a defaultdict of {factory} cannot be saved. Convert it to a dict in the "
                "object's state_dict()."
            )
        pairs = [next(name for name, known in FACTORIES.items() if known is factory), pairs]
    return {kind: pairs}


def _sequence(value: Any, where: str, put: Put, depth: int) -> Any:
    kind = SEQUENCES[type(value)]
    ordered = sorted(value, key=repr) if kind in ("~set", "~frozenset") else value
    items = [to_json(item, f"{where}.{number}", put, depth) for number, item in enumerate(ordered)]
    return {kind: items} if kind else items


def _numpy(value: Any, where: str, put: Put) -> Any:
    """Convert arrays to tensors, and numpy's integers to Python's."""
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.inexact):  # a float32 sum differs from a sum of Python floats
        return {"~number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, numpy.generic):
        return to_json(value.item(), where, put)
    try:
        return {"~array": put(where, torch.from_numpy(value.copy()))}
    except (TypeError, AttributeError) as error:
        if value.shape == ():  # text or an object, as numpy.load returns them
            return to_json(value.item(), where, put)
        raise CheckpointError(
            f"{where}: {error}. Convert it to a plain array in the object's state_dict()."
        ) from error


def from_json(value: Any, take: Take) -> Any:
    """Return the value from which `to_json` made the JSON; `take` turns the JSON for a tensor into
    one.

    Raises:
        CorruptCheckpoint: JSON that `to_json` does not make, or that does not stand for a tensor.
    """
    with reading_record("a saved value"):
        return _from_json(value, take)


def _from_json(value: Any, take: Take) -> Any:
    if isinstance(value, list):
        return [_from_json(item, take) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    written = cast("dict[str, Any]", value)
    mark = next(iter(written), "")
    if not mark.startswith(MARK):
        return {key: _from_json(item, take) for key, item in written.items()}
    inner = written[mark]
    if mark in DICTS.values():
        factory, pairs = inner if mark == "~defaultdict" else (None, inner)
        entries = {_from_json(key, take): _from_json(item, take) for key, item in pairs}
        kind = next(kind for kind, name in DICTS.items() if name == mark)
        return defaultdict(FACTORIES[factory], entries) if kind is defaultdict else kind(entries)
    if mark in SEQUENCES.values():
        kind = next(kind for kind, name in SEQUENCES.items() if name == mark)
        return kind([_from_json(item, take) for item in inner])
    if mark == "~array":
        return _from_json(inner, take).numpy()
    if mark == "~number":
        import numpy

        dtype, text = inner
        return numpy.frombuffer(base64.b64decode(text), dtype)[0]
    plain: dict[str, Callable[[str], Any]] = {
        "~float": float,
        "~dtype": lambda name: getattr(torch, name),
        "~device": torch.device,
        "~bytes": base64.b64decode,
        "~stream": lambda text: io.BytesIO(base64.b64decode(text)),
    }
    return plain[mark](inner) if mark in plain else take(written)
