"""A sum of floats without rounding: the same for any order, and for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class ExactSum:
    """A sum of floats, rounded once, like `math.fsum`.

    Attributes:
        finite: sum of the finite ones.
        other: sum of the infinite ones and NaN; 0 without any.
        count: number of all floats.
    """

    finite: Fraction = Fraction()
    other: float = 0.0
    count: int = 0

    @classmethod
    def of_values(cls, values: Iterable[float]) -> ExactSum:
        """Return the sum of some floats."""
        known = [*values]
        finite = [Fraction(value) for value in known if math.isfinite(value)]
        other = sum(value for value in known if not math.isfinite(value))
        return cls(sum(finite, Fraction()), float(other), len(known))

    def __add__(self, others: ExactSum) -> ExactSum:
        return ExactSum(
            self.finite + others.finite, self.other + others.other, self.count + others.count
        )

    def __float__(self) -> float:
        return self.other or float(self.finite)
