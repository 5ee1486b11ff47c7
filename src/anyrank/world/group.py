"""Which processes take part in a call, from its `process_group=`. No collectives."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.wording import join_first

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


def find_members(process_group: Group) -> tuple[list[int], int]:
    """The global ranks of a group, in its order, and this process's global rank.

    Raises:
        RankError: this process is not in the group.
        TypeError: `process_group` is no group, or was destroyed.
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
    """Refuse what is no group. A group without this process is still a group.

    Raises:
        TypeError: `process_group` is no group.
    """
    if process_group is None or process_group is ALONE:
        return
    if not dist.is_available() or not (
        isinstance(process_group, dist.ProcessGroup)
        or process_group == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise _no_group(process_group)


def _no_group(value: object) -> TypeError:
    return TypeError(
        "process_group= takes a group of torch.distributed that has not been destroyed, "
        f"anyrank.ALONE or None, not {value!r}"
    )


def default_store() -> Any:
    """The store of the default group, through which its processes met (torch's TCPStore)."""
    # No public name; the same private one has been there in every release since 1.8.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def hash_ranks(ranks: Sequence[int]) -> str:
    """A digest of the ranks for keys of the store, the same on each of them."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=12).hexdigest()


def name_ranks(ranks: Collection[int]) -> str:
    """Ranks as text: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_first([*ranks], SHOWN)}"
