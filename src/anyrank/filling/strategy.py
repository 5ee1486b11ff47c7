"""Which rank reads which bytes: the choice, and why. Pure, so that `plan` and `load` agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyrank.errors import LoadError
from anyrank.files.listing import Listing

# Below this, the latency of exchanging costs more than a second read of the same bytes saves.
MIN_STRIPE_BYTES = 256 << 20
ONE_MACHINE = "all ranks share one machine, whose page cache holds each byte once"


@dataclass(frozen=True)
class Decision:
    """A strategy, the ranks that read for it, and the reason in words.

    Attributes:
        name: "own": each rank reads its own bytes. "stripe": ranks that want the same bytes, or
            columns of the same rows, read disjoint parts and exchange them. "scatter": the ranks
            that see the source read, and send each rank its own part.
        readers: global ranks that read, for "scatter"; None when all do.
    """

    name: str
    reason: str
    readers: tuple[int, ...] | None = None


def decide(
    strategy: str,
    ranks: Sequence[int],
    caches: Sequence[int],
    sees: Sequence[bool],
    repeated_bytes: int,
) -> Decision:
    """Choose who reads.

    Args:
        strategy: what the caller asked for, of `model.options.STRATEGIES`.
        ranks: global ranks, in the group's order.
        caches: which of the page caches serves each: see `caches_of`.
        sees: whether each sees the source.
        repeated_bytes: bytes that ranks with different caches would each read.

    Raises:
        LoadError: a strategy that needs the source where some ranks do not see it.
    """
    if len(ranks) == 1:
        return Decision("own", ONE_MACHINE)
    seeing = tuple(rank for rank, sees_it in zip(ranks, sees, strict=True) if sees_it)
    blind = len(ranks) - len(seeing)
    if strategy == "scatter":
        return Decision("scatter", "asked for", seeing[:1])
    if blind:
        named = ", ".join(str(rank) for rank in seeing[:8])
        if strategy == "auto":
            text = f"{blind} of {len(ranks)} ranks do not see the source; read by rank {named}"
            return Decision("scatter", text, seeing)
        raise LoadError(
            f"strategy={strategy!r} needs the source on every rank; only rank {named} sees it: "
            "use strategy='auto' or 'scatter'"
        )
    if strategy != "auto":
        return Decision(strategy, "asked for")
    if len(set(caches)) == 1:
        return Decision("own", ONE_MACHINE)
    readers = "machines" if len(set(caches)) < len(ranks) else "ranks"
    if repeated_bytes < MIN_STRIPE_BYTES:
        return Decision("own", f"{readers} read little or nothing alike")
    return Decision("stripe", f"{readers} would read {repeated_bytes / 2**30:.1f} GiB alike")


def caches_of(ranks: Sequence[int], nodes: Sequence[int], listing: Listing) -> Sequence[int]:
    """Which page cache serves each rank: its machine's, or none but its own for a remote source."""
    return ranks if any("://" in info.path for info in listing.files) else nodes
