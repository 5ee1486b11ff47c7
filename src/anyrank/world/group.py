"""The processes that take part in a call, by its `process_group=`. No collectives."""

from __future__ import annotations

import enum
import hashlib
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from anyrank.errors import AnyrankError, RankError

log = logging.getLogger("anyrank.world")


class Alone(enum.Enum):
    """The type of `anyrank.ALONE`."""

    ALONE = "alone"

    def __repr__(self) -> str:
        return "anyrank.ALONE"


ALONE: Final = Alone.ALONE
"""`process_group=anyrank.ALONE`: only this process takes part, even if a group is initialized."""

Group: TypeAlias = "dist.ProcessGroup | Alone | None"
"""The type of `process_group=`: a group, this process alone, or None for all ranks."""


def find_members(process_group: Group) -> tuple[list[int], int]:
    """Find the global ranks of a group, in its order, and this process's global rank.

    Raises:
        RankError: this process is not in the group.
        TypeError: `process_group` is not a group, or was destroyed.
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
    """Refuse anything that is not a group. A group without this process is still a group. A warning
    is logged if an object is made for a group before it is initialized.

    Raises:
        TypeError: `process_group` is not a group.
    """
    if process_group is None or process_group is ALONE:
        if lacks_group(process_group):
            warn_of_no_group()
        return
    if not dist.is_available() or not (
        isinstance(process_group, dist.ProcessGroup)
        or process_group == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise _no_group(process_group)


def lacks_group(process_group: Group) -> bool:
    """Return whether a launcher started this process as one of several that no group joins."""
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return False
    ranks = os.environ.get("WORLD_SIZE", "1")
    return ranks.isdecimal() and int(ranks) > 1


def check_has_group(process_group: Group, call: str) -> None:
    """Refuse a call that several processes would each make alone: N runs in one folder.

    Raises:
        AnyrankError: a launcher has started several processes, and they are in no group.
    """
    if lacks_group(process_group):
        raise AnyrankError(
            f"{call}: WORLD_SIZE={os.environ['WORLD_SIZE']} processes were started, and they are "
            "in no process group, so each would train by itself: call "
            "torch.distributed.init_process_group() before, or pass process_group=anyrank.ALONE "
            "for this process by itself"
        )


@cache  # once in a process, because all calls before the group would repeat it
def warn_of_no_group() -> None:
    """Warn that calls before the process group concern this process alone."""
    log.warning(
        "WORLD_SIZE=%s processes were started, and they are in no process group yet: until "
        "torch.distributed.init_process_group() each loads and makes objects by itself; that is "
        "right for a model that is built before, as Lightning does, else call it first",
        os.environ["WORLD_SIZE"],
    )


def _no_group(value: object) -> TypeError:
    return TypeError(
        "process_group= takes a group of torch.distributed that has not been destroyed, "
        f"anyrank.ALONE or None, not {value!r}"
    )


def default_store() -> Any:
    """The store of the default group, through which its processes met (torch's TCPStore)."""
    # It has no public name; the same private one has been in every release since 1.8.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def hash_ranks(ranks: Sequence[int]) -> str:
    """Digest the ranks for keys of the store; the same on each of them."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=12).hexdigest()
