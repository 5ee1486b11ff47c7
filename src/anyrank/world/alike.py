"""Compares lines of text that must be the same on every rank, and finds where they differ.

A model has many lines, so the ranks compare digests of them. If the digests differ, one rank sends
its lines to all, each rank names the lines that differ from its own, and every rank reports the
text that it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

from anyrank.world.first_ranks import FirstRanks, join_ranks
from anyrank.world.ranks import Ranks

RanksByText: TypeAlias = "dict[str | None, FirstRanks]"
"""A text, or None if the line is missing, and the ranks that have it. The first few texts only."""

Key = TypeVar("Key", str, tuple[int, ...])

WHAT = "comparing what differs"


class Compared(NamedTuple):
    """A digest of some ranks' lines of one kind; all digests merged are the result of the
    comparison.

    Attributes:
        digest: "" if the ranks' digests differ.
        rank: the first rank that has lines of the kind.
    """

    digest: str
    rank: int

    def join(self, others: Compared) -> Compared:
        """Merge the digests of two sets of ranks."""
        same = self.digest if self.digest == others.digest else ""
        return Compared(same, min(self.rank, others.rank))


def digest_of(items: Iterable[object]) -> str:
    """Hash many values, in their order, so that ranks can compare them."""
    return hashlib.blake2b(repr([*items]).encode(), digest_size=16).hexdigest()


def digests_of_lines(lines: Mapping[Key, Mapping[str, str]], rank: int) -> dict[Key, Compared]:
    """Digest this rank's lines of each kind, for `join_digests` to merge."""
    return {kind: Compared(digest_of(texts.items()), rank) for kind, texts in lines.items()}


def join_digests(
    digests: Mapping[Key, Compared], others: Mapping[Key, Compared]
) -> dict[Key, Compared]:
    """Merge the digests of the ranks' lines; see `Ranks.reduce`."""
    joined = {**digests}
    for kind, compared in others.items():
        joined[kind] = joined[kind].join(compared) if kind in joined else compared
    return joined


def differing(
    lines: Mapping[Key, Mapping[str, str]],
    compared: Mapping[Key, Compared],
    ranks: Ranks,
    limit: int | None = None,
) -> dict[Key, dict[str, RanksByText]]:
    """Find the lines that differ between the ranks that have lines of their kind. Collective.

    Args:
        lines: this rank's lines, by kind.
        compared: `digests_of_lines` the lines of every rank, merged.
        ranks: ranks that compare.
        limit: maximum number of lines of one kind to return; None for all of them.

    Returns:
        Kind -> name -> the texts, with the ranks that have them.
    """
    wrong = {kind: known.rank for kind, known in sorted(compared.items()) if not known.digest}
    if not wrong:
        return {}
    own_lines = {kind: {**lines[kind]} for kind in wrong if kind in lines}
    sent = {kind: own_lines[kind] for kind, first in wrong.items() if first == ranks.rank}
    first = ranks.reduce(WHAT, sent, lambda some, others: some | others)

    def join_names(
        some: dict[Key, list[str]], others: dict[Key, list[str]]
    ) -> dict[Key, list[str]]:
        return {kind: [*dict.fromkeys(some[kind] + others[kind])][:limit] for kind in wrong}

    own_names = {
        kind: _unlike_names(own_lines.get(kind, first[kind]), first[kind], limit) for kind in wrong
    }
    names = ranks.reduce(WHAT, own_names, join_names)
    own_rank = FirstRanks.first_of([ranks.rank])
    own_texts = {
        kind: {name: {texts.get(name): own_rank} for name in names[kind]}
        for kind, texts in own_lines.items()
    }
    return ranks.reduce(WHAT, own_texts, _join_texts)


def unlike(ranks: Ranks, what: str, lines: Mapping[str, str]) -> dict[str, RanksByText]:
    """Find the lines that differ between ranks. If none differs, only one digest is sent.
    Collective.

    Args:
        ranks: ranks that compare.
        what: what the ranks do, for messages.
        lines: this rank's lines.
    """
    own_kind = {"lines": {**lines}}
    compared = ranks.reduce(what, digests_of_lines(own_kind, ranks.rank), join_digests)
    return differing(own_kind, compared, ranks).get("lines", {})


def _unlike_names(
    lines: Mapping[str, str], first: Mapping[str, str], limit: int | None
) -> list[str]:
    """Return the names of the lines that differ from the first rank's, in its order."""
    return [name for name in {**first, **lines} if lines.get(name) != first.get(name)][:limit]


def _join_texts(
    some: dict[Key, dict[str, RanksByText]], others: dict[Key, dict[str, RanksByText]]
) -> dict[Key, dict[str, RanksByText]]:
    joined = {**some}
    for kind, by_name in others.items():
        known = joined.get(kind, {})
        joined[kind] = {
            name: join_ranks(known.get(name, {}), by_text) for name, by_text in by_name.items()
        }
    return joined
