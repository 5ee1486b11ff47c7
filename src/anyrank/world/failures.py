"""Errors that are sent between ranks, and the one error that all ranks raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from anyrank.errors import AnyrankError, RankError

COLLECTIVE = re.compile("gloo|NCCL|[Cc]onnection (closed|reset) by peer")  # has no class of its own
NO_ANSWER = "no answer"  # the cause that is reported for a dead rank
SHOWN_CHARACTERS = 100  # of an argument in a message

V = TypeVar("V", bound=Hashable)


class Interrupted(Exception):
    """Another rank has failed: this one stops its work and goes to the agreement."""


@dataclass(frozen=True)
class Failure:
    """One rank's exception, as it is sent.

    Attributes:
        kind: its class; None if the rank stopped because another failed.
        text: its message.
        is_foreign: whether it is not anyrank's own, so that its text does not say what was done.
    """

    kind: type[AnyrankError] | None
    text: str
    is_foreign: bool = False


def argument_text(value: object) -> str:
    """An argument as text without addresses, as these differ between processes."""
    name = getattr(value, "__qualname__", None)
    return str(name) if callable(value) and name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def ranks_by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """Value -> the ranks that have it."""
    groups: dict[V, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def describe_values(
    title: str, values: Mapping[int, str | None], name_ranks: Callable[[Sequence[int]], str]
) -> str:
    """A title and each value with its ranks: "title: 1 on rank 0, 2 on ranks 1, 2"."""
    texts = {rank: "absent" if value is None else value for rank, value in values.items()}
    groups = ranks_by_value(texts).items()
    parts = (f"{text[:SHOWN_CHARACTERS]} on {name_ranks(ranks)}" for text, ranks in groups)
    return f"{title}: {', '.join(parts)}"


def is_death(error: BaseException | None) -> bool:
    """Whether an error says that another rank died, ours or that of a collective of torch's."""
    if isinstance(error, RankError):
        # Where a rank failed, its error is a cause; a connection that broke has none.
        return not error.causes or NO_ANSWER in error.causes.values()
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and COLLECTIVE.search(str(error)) is not None


def as_failure(error: Exception) -> Failure:
    if isinstance(error, Interrupted):
        return Failure(None, "stopped, because another rank failed")
    if isinstance(error, RankError):
        return Failure(RankError, str(error))
    if isinstance(error, AnyrankError):
        return Failure(type(error), str(error))
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return Failure(RankError, text, is_foreign=True)


def join_failures(what: str, failures: dict[int, Failure], size: int) -> AnyrankError:
    """One error for all ranks, equal on all of them."""
    raised = {rank: failure for rank, failure in failures.items() if failure.kind is not None}
    first = next(iter(raised.values()), Failure(RankError, "all ranks stopped for one another"))
    causes = {rank: failure.text for rank, failure in raised.items()}
    texts = set(causes.values())
    if len(raised) == size and len(texts) == 1:
        message = f"{what} failed on all ranks: {first.text}" if first.is_foreign else first.text
    else:
        message = "\n".join(f"[rank {rank}] {text}" for rank, text in causes.items())
        message = f"{what} failed on {len(raised)} of {size} ranks, so on all:\n{message}"
    return (first.kind or RankError)(message, causes=causes)
