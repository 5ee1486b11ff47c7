"""What ranks should have alike, in lines of text: where it differs, and on which ranks.

The lines of a model are many, so only a digest of them is gathered. Where digests differ, one rank
sends its lines to all, each names those that it has otherwise, and all send these.
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
        limit: of the lines of a kind that are returned; None for all of them.

    Returns:
        Kind -> name -> the text of each rank that has lines of the kind.
    """
    kinds = dict.fromkeys(kind for by_kind in digests for kind in by_kind)
    by_rank = dict(zip(ranks.ranks, digests, strict=True))
    having = {kind: {r: d[kind] for r, d in by_rank.items() if kind in d} for kind in kinds}
    wrong = sorted(kind for kind, known in having.items() if len({*known.values()}) > 1)
    if not wrong:
        return {}
    firsts = {kind: next(iter(having[kind])) for kind in wrong}  # the ranks that send their lines
    own_lines = {kind: {**lines[kind]} for kind in wrong if kind in lines}
    what = "comparing what differs"
    sent = ranks.gather(what, {k: own_lines[k] for k in own_lines if firsts[k] == ranks.rank})
    first = {kind: sent[ranks.ranks.index(firsts[kind])].get(kind, {}) for kind in wrong}
    proposed = ranks.gather(
        what, {k: _unlike_names(own_lines.get(k, first[k]), first[k], limit) for k in wrong}
    )
    # Each rank proposes names of its own, so all are asked for all of them.
    names = {
        k: [*dict.fromkeys(name for by_kind in proposed for name in by_kind[k])] for k in wrong
    }
    names = {kind: names[kind][:limit] for kind in wrong}
    own_texts = {
        kind: {n: texts.get(n) for n in names[kind] if texts.get(n) != first[kind].get(n)}
        for kind, texts in own_lines.items()
    }
    answers = dict(zip(ranks.ranks, ranks.gather(what, own_texts), strict=True))
    return {
        kind: {
            name: {r: answers[r][kind].get(name, first[kind].get(name)) for r in having[kind]}
            for name in names[kind]
        }
        for kind in wrong
    }


def _unlike_names(
    lines: Mapping[str, str], first: Mapping[str, str], limit: int | None
) -> list[str]:
    """Names of lines that are unlike the first rank's, in its order."""
    return [name for name in {**first, **lines} if lines.get(name) != first.get(name)][:limit]
