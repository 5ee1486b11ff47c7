"""The processes that take part in a call, from its `process_group=`. Does not communicate."""

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
"""The type of `process_group=`: a group, ALONE for only this process, or None for all ranks."""


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
            f"rank {rank} is not a member of process_group= (ranks {ranks}). Pass a group that "
            "contains it, or do not call on this rank."
        )
    return ranks, rank


def check_group(process_group: object) -> None:
    """Check that `process_group` is a group, which need not contain this process. Logs a warning if
    no group is initialized yet, although a launcher started several processes.

    Raises:
        TypeError: `process_group` is not a group.
    """
    if process_group is None or process_group is ALONE:
        if lacks_group(process_group):
            warn_about_no_group()
        return
    if not dist.is_available() or not (
        isinstance(process_group, dist.ProcessGroup)
        or process_group == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise _no_group(process_group)


def lacks_group(process_group: Group) -> bool:
    """Return whether a launcher started several processes that are not in a group."""
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return False
    ranks = os.environ.get("WORLD_SIZE", "1")
    return ranks.isdecimal() and int(ranks) > 1


def check_has_group(process_group: Group, call: str) -> None:
    """Check that the processes of a launcher are in a group: otherwise N runs share one folder.

    Raises:
        AnyrankError: a launcher has started several processes that are not in a group.
    """
    if lacks_group(process_group):
        raise AnyrankError(
            f"{call}: {os.environ['WORLD_SIZE']} processes were launched (WORLD_SIZE), but no "
            "process group is initialized, so each would run alone. First call "
            "torch.distributed.init_process_group(), or pass process_group=anyrank.ALONE to use "
            "only this process."
        )


@cache  # once in a process, because every call before the group would repeat it
def warn_about_no_group() -> None:
    """Warn that calls before the process group concern only this process."""
    log.warning(
        "%s processes were launched (WORLD_SIZE), but no process group is initialized yet. Until "
        "then every process acts alone. That is fine if a framework such as Lightning "
        "initializes the group later; otherwise call torch.distributed.init_process_group() "
        "first.",
        os.environ["WORLD_SIZE"],
    )


def _no_group(value: object) -> TypeError:
    return TypeError(
        f"process_group={value!r}: expected a torch.distributed group that has not been destroyed, "
        "anyrank.ALONE or None"
    )


def default_store() -> Any:
    """Return the store of the default group, through which its processes met (a TCPStore)."""
    # torch has no public name for it; the private one has been the same since release 1.8.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def hash_ranks(ranks: Sequence[int]) -> str:
    """Hash ranks for keys of the store; the result is the same on each of them."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=12).hexdigest()
