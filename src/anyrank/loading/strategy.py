"""Which rank reads which bytes: the choice, and why. Pure, so that `plan` and `load` agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyrank.errors import LoadError

# Below this, the latency of exchanging costs more than a second read of the same bytes saves.
MIN_STRIPE_BYTES = 256 << 20
ONE_MACHINE = "all ranks share one machine, whose page cache holds each byte once"


@dataclass(frozen=True)
class Decision:
    """A strategy, the ranks that read for it, and the reason in words.

    Attributes:
        name: "own": each rank reads its own bytes. "stripe": ranks that hold the same bytes read
            disjoint parts and exchange them. "scatter": the ranks that see the source read, and
            send each rank its own rows.
        readers: global ranks that read, for "scatter"; None when all do.
    """

    name: str
    reason: str
    readers: tuple[int, ...] | None = None


def decide(
    strategy: str,
    ranks: Sequence[int],
    nodes: Sequence[int],
    sees: Sequence[bool],
    replicated_bytes: int,
) -> Decision:
    """Choose who reads.

    Args:
        strategy: what the caller asked for, of `model.options.STRATEGIES`.
        ranks: global ranks, in the group's order.
        nodes: machine of each.
        sees: whether each sees the source.
        replicated_bytes: bytes that ranks on different machines hold alike.

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
    if len(set(nodes)) == 1:
        return Decision("own", ONE_MACHINE)
    if replicated_bytes < MIN_STRIPE_BYTES:
        return Decision("own", "machines hold little or nothing alike")
    return Decision("stripe", f"machines hold {replicated_bytes / 2**30:.1f} GiB alike")
