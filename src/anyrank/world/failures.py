"""Errors as ranks send them to each other, and the error that every rank raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from anyrank.errors import AnyrankError, RankError
from anyrank.wording import count
from anyrank.world.first_ranks import FirstRanks, name_ranks

# Errors of torch's collectives do not have their own class.
COLLECTIVE = re.compile("gloo|NCCL|[Cc]onnection (closed|reset) by peer")
NO_ANSWER = "no answer"  # the cause reported for a dead rank
SHOWN_CHARACTERS = 100  # of an argument in a message

V = TypeVar("V", bound=Hashable)


class Interrupted(Exception):
    """Raised if another rank has failed: this rank then stops its work and joins the agreement."""


@dataclass(frozen=True)
class Failure:
    """One rank's exception, in the form in which it is sent.

    Attributes:
        kind: class of the exception; None if the rank stopped because another failed.
        text: message of the exception.
        is_foreign: whether it is not one of anyrank's exceptions, so that its text does not name
            the operation.
    """

    kind: type[AnyrankError] | None
    text: str
    is_foreign: bool = False


def argument_text(value: object) -> str:
    """Return an argument as text without addresses, which differ between processes."""
    name = getattr(value, "__qualname__", None)
    return str(name) if callable(value) and name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def ranks_by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """Map each value to the ranks that have it."""
    groups: dict[V, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def describe_texts(
    title: str,
    by_text: Mapping[str | None, FirstRanks],
    name_ranks: Callable[[Sequence[int] | FirstRanks], str],
) -> str:
    """Join a title and each value with its ranks: "title: 1 on rank 0, 2 on ranks 1, 2"."""
    texts = (("absent" if value is None else value, ranks) for value, ranks in by_text.items())
    parts = (f"{text[:SHOWN_CHARACTERS]} on {name_ranks(ranks)}" for text, ranks in texts)
    return f"{title}: {', '.join(parts)}"


def is_death(error: BaseException | None) -> bool:
    """Return whether an error, from anyrank or a torch collective, means that another rank died."""
    if isinstance(error, RankError):
        # If a rank failed, its error is a cause; a broken connection has no cause.
        return not error.causes or NO_ANSWER in error.causes.values()
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and COLLECTIVE.search(str(error)) is not None


def as_failure(error: Exception) -> Failure:
    if isinstance(error, Interrupted):
        return Failure(None, "stopped because another rank failed")
    if isinstance(error, RankError):
        return Failure(RankError, str(error))
    if isinstance(error, AnyrankError):
        return Failure(type(error), str(error))
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return Failure(RankError, text, is_foreign=True)


def join_failures(
    what: str, failures: Mapping[Failure, FirstRanks], failed: int, size: int
) -> AnyrankError:
    """Make the error that every rank raises.

    Args:
        what: what the ranks did.
        failures: the first few failures, in the order of the ranks, with the ranks that had them.
        failed: number of ranks that have raised an exception.
        size: number of ranks.
    """
    raised = {failure: ranks for failure, ranks in failures.items() if failure.kind is not None}
    first = next(
        iter(raised),
        Failure(RankError, "every rank stopped because of another one; no cause was reported"),
    )
    causes = {rank: failure.text for failure, some in raised.items() for rank in some.ranks}
    if len(raised) == 1 and failed == size:
        message = f"{what} failed on every rank: {first.text}" if first.is_foreign else first.text
    else:
        lines = [f"[{name_ranks(ranks)}] {failure.text}" for failure, ranks in raised.items()]
        unnamed = failed - sum(ranks.count for ranks in raised.values())
        lines += [f"and {count(unnamed, 'more rank')}"] if unnamed else []
        message = "\n".join(
            [f"{what} failed on {failed} of {size} ranks, so every rank stops:", *lines]
        )
    return (first.kind or RankError)(message, causes=dict(sorted(causes.items())))
