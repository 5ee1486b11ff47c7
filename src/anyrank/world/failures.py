"""Errors and values that travel between ranks, and one error for those of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.errors import AnyrankError, RankError

SHOWN_CHARACTERS = 100  # of an argument in a message


class Interrupted(Exception):
    """Another rank has failed; this one stops what it is doing and joins the agreement."""


@dataclass(frozen=True)
class _Failure:
    """One rank's exception, as it travels.

    Attributes:
        kind: its class; None if it stopped because of others.
        text: its message.
        is_foreign: whether it is not anyrank's own, so that its text does not say what was done.
    """

    kind: type[AnyrankError] | None
    text: str
    is_foreign: bool = False


@dataclass(frozen=True)
class Answer:
    """One rank's result and failure."""

    value: Any
    failure: _Failure | None


def shown(value: object) -> str:
    """An argument as it is compared: without addresses, which differ from process to process."""
    name = getattr(value, "__qualname__", None)
    return str(name) if callable(value) and name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def different(title: str, values: Mapping[int, str], name: Callable[[Sequence[int]], str]) -> str:
    """Values by rank, in words."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    each = (f"{v[:SHOWN_CHARACTERS]} on {name(ranks)}" for v, ranks in by_value.items())
    return f"{title}: {', '.join(each)}"


def same_error(
    call: str,
    failed: Mapping[int, tuple[type[Exception], str]],
    size: int,
    name: Callable[[Sequence[int]], str],
) -> Exception:
    """What some ranks' checks raised, equal on all ranks."""
    kind, text = next(iter(failed.values()))
    if issubclass(kind, AnyrankError):
        failures = {
            r: _Failure(k, t) for r, (k, t) in failed.items() if issubclass(k, AnyrankError)
        }
        return joined(f"{call}()", failures, size)
    if len(failed) < size:
        text = f"{text} (on {name(list(failed))})"
    return kind(text)


def failure_of(error: Exception) -> _Failure:
    if isinstance(error, Interrupted):
        return _Failure(None, "stopped, because another rank failed")
    if isinstance(error, RankError):
        return _Failure(RankError, str(error))
    if isinstance(error, AnyrankError):
        return _Failure(type(error), str(error))
    return _Failure(RankError, f"{type(error).__name__}: {error}", is_foreign=True)


def joined(what: str, failures: dict[int, _Failure], size: int) -> AnyrankError:
    """One error for all ranks, equal on all of them."""
    own = {rank: failure for rank, failure in failures.items() if failure.kind is not None}
    first = next(iter(own.values()), _Failure(RankError, "all ranks stopped for one another"))
    causes = {rank: failure.text for rank, failure in own.items()}
    texts = set(causes.values())
    if len(own) == size and len(texts) == 1:
        message = f"{what} failed on all ranks: {first.text}" if first.is_foreign else first.text
    else:
        message = "\n".join(f"[rank {rank}] {text}" for rank, text in causes.items())
        message = f"{what} failed on {len(own)} of {size} ranks, so on all:\n{message}"
    return (first.kind or RankError)(message, causes=causes)
