"""An order that draws samples with replacement, by weights; any part can be computed anywhere.

Computed in integers, so that every machine draws the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anyrank.data.order import Order
from anyrank.tensors.hashing import derive, mix64, signed

WEIGHTED_NAME = "weighted-v1"
TOTAL = 1 << 44  # sum of the scaled weights; small compared with the 63 bits of a draw


@dataclass(frozen=True)
class WeightedOrder(Order):
    """An epoch of n independent draws, for a dataset of n samples.

    Attributes:
        digest: of the weights.
        ends: int64 [n], the cumulative sums of the scaled weights.
    """

    digest: str
    ends: torch.Tensor = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The method, and a digest of the weights."""
        return f"{WEIGHTED_NAME} {self.digest}"

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {"weights": f"digest {self.digest}"}

    @property
    def repeats(self) -> bool:
        return True

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Sample ids at positions [start, stop) of an epoch, int64."""
        places = torch.arange(start, stop, device="cpu")
        drawn = mix64(mix64(places) ^ signed(derive(self.seed, epoch, WEIGHTED_NAME)))
        number = (drawn & ((1 << 63) - 1)) % self.ends[-1]
        return torch.searchsorted(self.ends, number, right=True)


def weighted_order(n: int, seed: int, weights: Sequence[float] | torch.Tensor) -> WeightedOrder:
    """The order of n draws by the weights of n samples.

    Raises:
        TypeError: weights that are not numbers.
        ValueError: weights that are not n, or negative, not finite, or all zero.
    """
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights= takes {n} numbers, one for each sample: {error}") from error
    if values.shape != (n,):
        raise ValueError(f"weights has shape {list(values.shape)}: give {n}, one for each sample")
    if not bool(values.isfinite().all()) or bool((values < 0).any()) or not bool(values.any()):
        raise ValueError("weights must be finite, at least 0, and not all 0")
    largest = float(values.max())
    scaled = values / largest  # before the sum, which might overflow
    total = math.fsum(scaled.tolist())
    parts = (scaled * (TOTAL / total)).ceil().to(torch.int64)
    digest = derive(str(_receipt_of_parts(parts)), size=4)
    return WeightedOrder(n, seed, True, f"{digest:08x}", parts.cumsum(0))


def _receipt_of_parts(parts: torch.Tensor) -> list[int]:
    """A value that distinguishes weights: the sum of a hash of each weight and its position."""
    places = torch.arange(len(parts), device="cpu")
    return [len(parts), int(mix64(mix64(parts) ^ places).sum())]
