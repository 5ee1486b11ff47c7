"""The first of some ranks and how many there are: what an error says of a thousand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

SHOWN = 8  # ranks that a message names, and kinds of them that it tells apart


@dataclass(frozen=True)
class FirstRanks:
    """Ranks that have something in common; it takes the same few bytes for any number of them.

    Attributes:
        ranks: the first few, in order.
        count: how many there are.
    """

    ranks: tuple[int, ...]
    count: int

    @classmethod
    def first_of(cls, ranks: Iterable[int]) -> FirstRanks:
        """The first of these ranks."""
        ordered = sorted(ranks)
        return cls(tuple(ordered[:SHOWN]), len(ordered))

    @property
    def listed(self) -> str:
        """Their numbers as a list: "[0, 1]"."""
        more = f" and {self.count - len(self.ranks):,} more" if self.count > len(self.ranks) else ""
        return f"{[*self.ranks]}{more}"

    def __add__(self, other: FirstRanks) -> FirstRanks:
        ordered = sorted({*self.ranks, *other.ranks})
        return FirstRanks(tuple(ordered[:SHOWN]), self.count + other.count)


def name_ranks(ranks: Collection[int] | FirstRanks) -> str:
    """Ranks as text: "rank 1", "ranks 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    some = ranks if isinstance(ranks, FirstRanks) else FirstRanks(tuple(ranks)[:SHOWN], len(ranks))
    names = ", ".join(map(str, some.ranks))
    more = f" and {some.count - len(some.ranks):,} more" if some.count > len(some.ranks) else ""
    return f"rank{'s' if some.count > 1 else ''} {names}{more}"


def join_first(some: Mapping[K, FirstRanks], others: Mapping[K, FirstRanks]) -> dict[K, FirstRanks]:
    """The ranks of each kind, joined: of the first few kinds, by their first ranks."""
    joined = {**some}
    for kind, ranks in others.items():
        joined[kind] = joined[kind] + ranks if kind in joined else ranks
    ordered = sorted(joined.items(), key=lambda item: item[1].ranks)
    return dict(ordered[:SHOWN])
