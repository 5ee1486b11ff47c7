"""What ranks should have alike, in lines of text: where it differs, and on which ranks.

The lines of a model are many, so only a digest of them is gathered. Where digests differ, one rank
sends its lines to all, and each answers with those that it has otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from anyrank.world.ranks import Ranks

Values: TypeAlias = "dict[int, str | None]"  # rank -> its text; None where it lacks the line
Key = TypeVar("Key", str, tuple[int, ...])


def unlike(lines: Mapping[int, Mapping[str, str | None]]) -> dict[str, Values]:
    """The lines that ranks do not have alike.

    Args:
        lines: of each rank.
    """
    names = dict.fromkeys(name for own_lines in lines.values() for name in own_lines)
    values = {name: {rank: known.get(name) for rank, known in lines.items()} for name in names}
    return {name: by_rank for name, by_rank in values.items() if len({*by_rank.values()}) > 1}


def digest_of(items: Iterable[object]) -> str:
    """A hash of many values, in their order, by which other ranks see whether theirs are equal."""
    return hashlib.blake2b(repr([*items]).encode(), digest_size=16).hexdigest()


def differing(
    lines: Mapping[Key, Mapping[str, str]],
    digests: Sequence[Mapping[Key, str]],
    ranks: Ranks,
    limit: int | None = None,
) -> dict[Key, dict[str, Values]]:
    """Lines that differ between ranks that have lines of their kind. All ranks.

    Args:
        lines: of this rank, by kind.
        digests: of every rank, in order: `digest_of` the items of its lines, by kind.
        ranks: that compare.
        limit: of the lines of a kind that a rank answers with; None for all of them.

    Returns:
        Kind -> name -> the text of each rank that has lines of the kind.
    """
    kinds = dict.fromkeys(kind for by_kind in digests for kind in by_kind)
    by_rank = dict(zip(ranks.ranks, digests, strict=True))
    having = {kind: {r: d[kind] for r, d in by_rank.items() if kind in d} for kind in kinds}
    wrong = sorted(kind for kind, known in having.items() if len({*known.values()}) > 1)
    return {k: _differing(k, lines.get(k), [*having[k]], ranks, limit) for k in wrong}


def _differing(
    kind: object,
    lines: Mapping[str, str] | None,
    having: Sequence[int],
    ranks: Ranks,
    limit: int | None,
) -> dict[str, Values]:
    """`differing` of one kind, of which the ranks `having` have lines. All ranks."""
    first = ranks.run_on_one(f"comparing {kind}", lambda: lines or {}, having[0])
    lines = first if lines is None else lines
    names = [name for name in {**first, **lines} if lines.get(name) != first.get(name)][:limit]
    answers = ranks.gather({name: lines.get(name) for name in names}, f"comparing {kind}")
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    return {
        name: {rank: by_rank[rank].get(name, first.get(name)) for rank in having}
        for name in dict.fromkeys(name for answer in answers for name in answer)
    }
