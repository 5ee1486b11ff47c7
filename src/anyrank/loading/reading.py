"""Decide who reads the bytes of a load: each rank its own, unless there is a reason against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyrank.loading.sharing.flows import FileFlows

ONE_MACHINE = "all ranks share one machine, whose page cache holds each byte once"
REQUESTED = "requested by strategy="


@dataclass(frozen=True)
class Reading:
    """A strategy, a text with the reason, and its flows.

    Attributes:
        strategy: "own": each rank reads its own bytes. "stripe": ranks that want the same bytes, or
            columns of the same rows, read disjoint parts and exchange them. "scatter": the ranks
            that see the source read, and send each rank its own part.
        reading_ranks: global ranks that read.
        flows: the exchange between ranks; None if each reads its own bytes.
    """

    strategy: str
    reason: str
    reading_ranks: tuple[int, ...]
    flows: FileFlows | None = None


def why_own(strategy: str, caches: Sequence[int], sees: Sequence[bool]) -> str | None:
    """Return the reason why each rank reads its own bytes; None if that is not decided yet.

    Args:
        strategy: the caller's choice among `model.options.STRATEGIES`.
        caches: the page cache that serves each rank: that of its machine, or only its own.
        sees: whether each rank sees the source.
    """
    if len(sees) == 1:
        return ONE_MACHINE  # no other rank to exchange bytes with, whatever strategy= says
    if not all(sees) or strategy not in ("own", "auto"):
        return None
    if strategy == "own":
        return REQUESTED
    return ONE_MACHINE if len(set(caches)) == 1 else None


def caches_of(ranks: Sequence[int], nodes: Sequence[int], paths: Sequence[str]) -> Sequence[int]:
    """Return the page cache of each rank: its machine's, or for a remote source only its own."""
    return ranks if any("://" in path for path in paths) else nodes
