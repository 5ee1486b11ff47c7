"""Decide who reads which bytes if ranks may share the reading, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyrank.errors import LoadError
from anyrank.loading.reading import REQUESTED, Reading
from anyrank.loading.sharing.flows import FileFlows, Wanted, gap_bytes
from anyrank.loading.sharing.shared_reads import in_one_chunk, shared_reads
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.tensors.sharded_tensor import Coordinates, replicas
from anyrank.world.first_ranks import name_ranks
from anyrank.world.ranks import Ranks

# Below this, the latency of an exchange costs more than a second read of the same bytes.
MIN_STRIPE_BYTES = 256 << 20


def shared_reading(
    strategy: str,
    match: ModelMatch,
    coordinates: Mapping[int, Coordinates],
    caches: Sequence[int],
    sees: Sequence[bool],
    ranks: Ranks,
    buffer_bytes: int,
) -> Reading:
    """Decide who reads, and what passes between ranks. The result is the same on every rank.

    Args:
        strategy: the caller's choice.
        match: match of this rank's model.
        coordinates: coordinates of every rank, by global rank.
        caches, sees: those of each rank, as for `why_own`.
        ranks: the ranks of the call.
        buffer_bytes: staging memory.

    Raises:
        LoadError: as for `decide`.
    """
    repeated = _repeated(match, coordinates, dict(zip(ranks.ranks, caches, strict=True)))
    name, reason, reading_ranks = decide(strategy, ranks.ranks, caches, sees, repeated)
    if name == "own":
        return Reading(name, reason, ranks.ranks)
    flows = FileFlows(
        wanted=[Wanted(i, match.tensors[i], stored) for i, stored in match.wanted],
        listing=match.listing,
        coordinates=coordinates,
        nodes=dict(zip(ranks.ranks, ranks.nodes, strict=True)),
        reading_ranks=reading_ranks,
        stage_bytes=buffer_bytes // 2,  # the other half is for the window
    )
    return Reading(name, reason, reading_ranks or ranks.ranks, flows)


def decide(
    strategy: str,
    ranks: Sequence[int],
    caches: Sequence[int],
    sees: Sequence[bool],
    repeated_bytes: int,
) -> tuple[str, str, tuple[int, ...] | None]:
    """Choose who reads, if `why_own` has not decided it.

    Args:
        strategy: the caller's choice among `model.options.STRATEGIES`.
        ranks: global ranks, in the group's order.
        caches, sees: those of each rank, as for `why_own`.
        repeated_bytes: bytes that ranks with different caches would each read.

    Returns:
        The strategy, a text with the reason, and the ranks that read; None if the ranks that want
        a block take turns.

    Raises:
        LoadError: a strategy that needs the source on ranks that do not see it.
    """
    seeing = tuple(rank for rank, sees_it in zip(ranks, sees, strict=True) if sees_it)
    blind = len(ranks) - len(seeing)
    if strategy == "scatter":
        return "scatter", REQUESTED, seeing[:1]
    if blind:
        can_see = name_ranks(seeing)
        if strategy == "auto":
            text = f"{blind} of {len(ranks)} ranks cannot see the source, so {can_see} "
            return "scatter", text + ("reads it" if len(seeing) == 1 else "read it"), seeing
        raise LoadError(
            f"strategy={strategy!r} needs the source on every rank, but only {can_see} can see it. "
            "Use strategy='auto' or 'scatter'"
        )
    if strategy != "auto":
        return strategy, REQUESTED, None
    reader = "machine" if len(set(caches)) < len(ranks) else "rank"
    if repeated_bytes < MIN_STRIPE_BYTES:
        return "own", f"few or no bytes are needed by more than one {reader}", None
    repeated = f"{repeated_bytes / 2**30:.1f} GiB"
    return "stripe", f"each {reader} would otherwise read the same {repeated}", None


def _repeated(
    match: ModelMatch, coordinates: Mapping[int, Coordinates], cache_of: Mapping[int, int]
) -> int:
    """Return the number of bytes that ranks with different page caches would each read."""
    if len(set(cache_of.values())) == 1:
        return 0
    total = 0
    for index, stored in match.stored.items():
        groups = replicas(index, match.tensors[index], coordinates)
        whole = in_one_chunk(stored)  # takes only as many steps as there are groups
        for shared in shared_reads(whole, groups, gap_bytes(stored, match.listing)):
            caches = {cache_of[rank] for rank in shared.takers}
            total += shared.read.nbytes if len(caches) > 1 else 0
    return total
