"""The first few of many ranks and their number, for errors that concern a thousand ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

SHOWN = 8  # ranks that a message names, and kinds of ranks that it distinguishes


@dataclass(frozen=True)
class FirstRanks:
    """A set of ranks in a few bytes: the first ones and the number of all.

    Attributes:
        ranks: the first few ranks, in order.
        count: number of all ranks of the set.
    """

    ranks: tuple[int, ...]
    count: int

    @classmethod
    def first_of(cls, ranks: Iterable[int]) -> FirstRanks:
        """Keep the first of the ranks, and count all of them."""
        ordered = sorted(ranks)
        return cls(tuple(ordered[:SHOWN]), len(ordered))

    @property
    def listed(self) -> str:
        """The ranks as a list: "[0, 1]"."""
        more = f" and {self.count - len(self.ranks):,} more" if self.count > len(self.ranks) else ""
        return f"{[*self.ranks]}{more}"

    def __add__(self, other: FirstRanks) -> FirstRanks:
        ordered = sorted({*self.ranks, *other.ranks})
        return FirstRanks(tuple(ordered[:SHOWN]), self.count + other.count)


def name_ranks(ranks: Collection[int] | FirstRanks) -> str:
    """Return ranks as text: "rank 1", "ranks 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    some = ranks if isinstance(ranks, FirstRanks) else FirstRanks(tuple(ranks)[:SHOWN], len(ranks))
    names = ", ".join(map(str, some.ranks))
    more = f" and {some.count - len(some.ranks):,} more" if some.count > len(some.ranks) else ""
    return f"rank{'s' if some.count > 1 else ''} {names}{more}"


def join_ranks(some: Mapping[K, FirstRanks], others: Mapping[K, FirstRanks]) -> dict[K, FirstRanks]:
    """Join the ranks of each kind; keep the first few kinds, in the order of their first ranks."""
    joined = {**some}
    for kind, ranks in others.items():
        joined[kind] = joined[kind] + ranks if kind in joined else ranks
    ordered = sorted(joined.items(), key=lambda item: item[1].ranks)
    return dict(ordered[:SHOWN])
