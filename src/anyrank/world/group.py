"""Which processes take part in a call, as its `process_group=` says. No collectives."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.wording import joined

SHOWN = 8  # ranks that a message names


class Alone(enum.Enum):
    """The type of `anyrank.ALONE`."""

    ALONE = "alone"

    def __repr__(self) -> str:
        return "anyrank.ALONE"


ALONE: Final = Alone.ALONE
"""`process_group=anyrank.ALONE`: this process alone takes part, though a group is initialised."""

Group: TypeAlias = "dist.ProcessGroup | Alone | None"
"""What `process_group=` takes: a group, this process alone, or None for all ranks."""


def members(process_group: Group) -> tuple[list[int], int]:
    """The global ranks that take part, in the group's order, and this process's own.

    Raises:
        RankError: this process is not in the group.
        TypeError: it is not a group, or one that was destroyed.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None and process_group is not ALONE:
            raise _no_group(process_group)
        return [0], 0
    rank = dist.get_rank()
    if process_group is ALONE:
        return [rank], rank
    try:
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    except (KeyError, TypeError) as error:
        raise _no_group(process_group) from error
    if rank not in ranks:
        raise RankError(
            f"rank {rank} is not in the process group it called with, ranks {ranks}: call with a "
            "group of its own, or not on this rank"
        )
    return ranks, rank


def check_group(process_group: object) -> None:
    """Refuse what names no processes. A group that lacks this one is still a group.

    Raises:
        TypeError: it is no group.
    """
    if process_group is None or process_group is ALONE:
        return
    if not dist.is_available() or not (
        isinstance(process_group, dist.ProcessGroup)
        or process_group == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise _no_group(process_group)


def _no_group(given: object) -> TypeError:
    return TypeError(
        "process_group= takes a group of torch.distributed that has not been destroyed, "
        f"anyrank.ALONE or None, not {given!r}"
    )


def default_store() -> Any:
    """The store through which the processes found each other."""
    # No public name; the same private one has been there in every release since 1.8.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def key_of(ranks: Sequence[int]) -> str:
    """A short name of these ranks, the same on each of them."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=12).hexdigest()


def named(ranks: Collection[int]) -> str:
    """Ranks in words: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined([*ranks], SHOWN)}"
