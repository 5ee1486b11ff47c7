"""The first of some ranks and how many there are: what an error says of a thousand."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

SHOWN = 8  # ranks that a message names


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

    def __add__(self, other: FirstRanks) -> FirstRanks:
        ordered = sorted({*self.ranks, *other.ranks})
        return FirstRanks(tuple(ordered[:SHOWN]), self.count + other.count)


def name_ranks(ranks: Collection[int] | FirstRanks) -> str:
    """Ranks as text: "rank 1", "ranks 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    some = ranks if isinstance(ranks, FirstRanks) else FirstRanks(tuple(ranks)[:SHOWN], len(ranks))
    names = ", ".join(map(str, some.ranks))
    more = f" and {some.count - len(some.ranks):,} more" if some.count > len(some.ranks) else ""
    return f"rank{'s' if some.count > 1 else ''} {names}{more}"
