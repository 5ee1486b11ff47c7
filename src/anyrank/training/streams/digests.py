"""Digests that show whether a row that is read again is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, cast
from zlib import crc32

SPREAD, TEXT = 16, 1000  # values of a sequence, and characters, that are used for a digest


def digest_of_row(row: Any) -> str:
    """Return a digest of a row: some values of a long one, spread over it; an object's type."""
    text = ""
    with suppress(Exception):  # an unusual value is identified by its type
        text = _as_text(row)
    return f"{crc32(text.encode(errors='replace')):08x}"


def _as_text(value: Any) -> str:
    """Return text that distinguishes a value from others, in a few microseconds."""
    if isinstance(value, int | float | complex | None):
        return repr(value)
    if isinstance(value, str | bytes):
        return f"{len(value)} {value[:TEXT]!r}"
    if isinstance(value, dict):
        items = islice(cast("dict[Any, Any]", value).items(), SPREAD)
        return f"{len(cast('dict[Any, Any]', value))} {[(k, _as_text(v)) for k, v in items]}"
    if isinstance(value, list | tuple | deque):
        values = [*cast("Sequence[Any]", value)]
        return f"{len(values)} {[_as_text(part) for part in _spread(values)]}"
    if isinstance(value, set | frozenset):
        return f"{len(cast('set[Any]', value))} values"
    if hasattr(value, "ravel"):  # of numpy or torch
        return f"{tuple(value.shape)} {_spread(value.ravel()).tolist()}"
    return type(value).__name__


def _spread(values: Any) -> Any:
    """Return some elements of a sequence, from its start to its end."""
    return values[:: -(-len(values) // SPREAD)] if len(values) > SPREAD else values
