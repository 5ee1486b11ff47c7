"""An order that draws samples with replacement, by weights; any part can be computed anywhere.

Computed in integers, so that every machine draws the same samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from anyrank.tensors.hashing import derive, mix64, signed
from anyrank.training.data.order import Order

WEIGHTED_NAME = "weighted-v1"
CHUNK = 1 << 15  # weights at a time: temporaries stay in the processor's cache
DIGIT_BITS = 30  # so that the sum of a chunk's digits is exact in float64
TOTAL = 1 << 44  # sum of the scaled weights; small compared with the 63 bits of a draw


@dataclass(frozen=True)
class WeightedOrder(Order):
    """An epoch of n independent draws, for a dataset of n samples.

    Attributes:
        digest: digest of the weights.
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
    """Return the order of n draws by the weights of n samples.

    Besides the weights it takes the 8 bytes per sample that the order keeps, and 8 more for
    weights that are not a tensor or array of numbers.

    Raises:
        TypeError: weights that are not numbers.
        ValueError: the number of weights is not n, or they are negative, not finite, or all zero.
    """
    try:
        dtype = None if hasattr(weights, "dtype") else torch.float64
        values = torch.as_tensor(weights, dtype=dtype, device="cpu")
        values.new_zeros(1).to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights=: expected {n} numbers, one per sample. {error}") from error
    if values.shape != (n,):
        raise ValueError(f"weights= has shape {list(values.shape)}: must be [{n}], one per sample")
    with _one_thread():
        return _order_of(values, seed)


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    """Compute with one thread: on such small chunks several would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _order_of(values: torch.Tensor, seed: int) -> WeightedOrder:
    n = len(values)
    chunks = range(0, n, CHUNK)
    bounds = [torch.stack(_chunk(values, offset).aminmax()) for offset in chunks]
    smallest, largest = float(torch.stack(bounds).min()), float(torch.stack(bounds).max())
    if not (math.isfinite(smallest) and math.isfinite(largest) and smallest >= 0 < largest):
        raise ValueError("weights= must be finite, at least 0, and not all 0")
    # Divided before the sum, which might overflow otherwise.
    total = exact_sum(_chunk(values, offset) / largest for offset in chunks)
    ends = torch.empty(n, dtype=torch.int64, device="cpu")
    carry = hashes = 0
    for offset in chunks:
        parts = (_chunk(values, offset) / largest * (TOTAL / total)).ceil().to(torch.int64)
        hashes = (hashes + int(_hash_of_parts(parts, offset))) % (1 << 64)
        part_ends = torch.cumsum(parts, 0, out=ends[offset : offset + len(parts)])
        part_ends += carry
        carry = int(part_ends[-1])
    # The digest combines the number of weights with the sum of a hash of each weight and its
    # position.
    digest = derive(str([n, signed(hashes)]), size=4)
    return WeightedOrder(n, seed, True, f"{digest:08x}", ends)


def _chunk(values: torch.Tensor, offset: int) -> torch.Tensor:
    return values[offset : offset + CHUNK].to(torch.float64)


def _hash_of_parts(parts: torch.Tensor, offset: int) -> torch.Tensor:
    places = torch.arange(offset, offset + len(parts), device="cpu")
    return mix64(mix64(parts) ^ places).sum()


def exact_sum(chunks: Iterable[torch.Tensor]) -> float:
    """Return the sum of values from 0 to 1, as `math.fsum` rounds it, whatever the chunks.

    Each value is cut into digits of 30 bits, whose sums are whole numbers.
    """
    sums: list[int] = []
    for chunk in chunks:
        rest, level = chunk, 0
        while bool(rest.any()):
            rest = rest * (1 << DIGIT_BITS)
            digits = rest.floor()
            rest = rest - digits
            sums += [0] if level == len(sums) else []
            sums[level] += int(digits.sum())
            level += 1
    total = 0
    for digit_sum in sums:
        total = (total << DIGIT_BITS) + digit_sum
    return total / (1 << DIGIT_BITS * len(sums))
