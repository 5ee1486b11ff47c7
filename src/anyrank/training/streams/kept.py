"""What a transform keeps between rows, which a resume must restore."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from anyrank.training.streams.digests import digest_of

STATE_BYTES = 1024  # of a transform's state, as JSON


def parts_of(value: Any) -> dict[str, str]:
    """Return digests of an object's attributes, including those in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    parts = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    parts |= getattr(value, "__dict__", {})
    return {name: digest_of(part) for name, part in parts.items()}


def check_kept(transform: Any, fresh_parts: Mapping[str, str] | None) -> None:
    """Check that a transform keeps nothing that a resume cannot restore.

    Args:
        transform: transform after some rows.
        fresh_parts: digests of its attributes before the first; None: it has its own method.

    Raises:
        TypeError: it has neither `held` nor `state_dict`, and no longer equals a fresh one.
    """
    if fresh_parts is None:
        return
    parts = parts_of(transform)
    if kept := [name for name, digest in parts.items() if fresh_parts.get(name) != digest]:
        raise TypeError(
            f"transform {type(transform).__name__} changed {', '.join(kept)}, which a resume, or a "
            "rank that continues the lane, cannot restore. Implement held() to return the numbers "
            "of the rows still needed (they are fed again), or state_dict(). If samples do not "
            "depend on it (a cache, a counter for a log), return [] from held()."
        )


def _keys_of(value: Any) -> Iterator[Any]:
    """Yield the keys of all dicts in a value that JSON can hold."""
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        yield from table
        value = [*table.values()]
    if isinstance(value, list | tuple):
        for part in cast("list[Any]", value):
            yield from _keys_of(part)


def inner_state_of(transform: Any) -> str:
    """Return a transform's own state as JSON; empty without one.

    Raises:
        TypeError: it is not JSON, or is too large, or JSON would change its keys.
    """
    get_state = getattr(transform, "state_dict", None)
    state = None if get_state is None else get_state()
    if state is None:
        return ""
    name = type(transform).__name__
    way_out = (
        "Leave rows out of state_dict(), and return their numbers from held(): they are read and "
        "fed again after a resume."
    )
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}.state_dict() does not return JSON ({error}). {way_out}") from error
    for key in _keys_of(state):
        if not isinstance(key, str):
            raise TypeError(
                f"{name}.state_dict() has the key {key!r}, which a resume would return as text, "
                "because JSON has no other keys. Return such a dict as list(table.items()), and "
                "make it again with dict() in load_state_dict()."
            )
    if len(text) > STATE_BYTES:
        raise TypeError(
            f"{name}.state_dict() has {len(text)} bytes, but a lane's limit is {STATE_BYTES}, "
            f"because ranks exchange it in every step. {way_out}"
        )
    return text
