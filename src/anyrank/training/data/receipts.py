"""Proof that each sample of an epoch was run once: the count and the sum of hashed sample ids.

A sample that is repeated, lost or replaced changes the sum. Receipts can be added, over ranks and
over the parts of a resumed epoch, so 16 bytes are enough for an epoch of any length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from anyrank.tensors.hashing import derive, mix64, signed
from anyrank.wording import count

MASK = (1 << 64) - 1
SUMMED_AT_ONCE = 1000  # samples: a sum takes 100 us, mostly for itself


@dataclass(frozen=True)
class Receipt:
    """A digest of a multiset of samples.

    Attributes:
        count: number of samples.
        sum: sum of their 64-bit hashes, modulo 2 ** 64.
    """

    count: int = 0
    sum: int = 0

    def __add__(self, other: Receipt) -> Receipt:
        """Return the receipt of both sets together."""
        return Receipt(self.count + other.count, (self.sum + other.sum) & MASK)

    def to_json(self) -> list[Any]:
        """Return [count, sum]; the sum as 16 hex digits, which every JSON parser preserves."""
        return [self.count, f"{self.sum:016x}"]

    @staticmethod
    def from_json(value: Any) -> Receipt:
        """Read a receipt from `to_json`'s form. Raises ValueError or TypeError for anything
        else."""
        count, total = value
        return Receipt(int(count), int(total, 16))


class EpochVerdict(NamedTuple):
    """A finished epoch: its number, its number of samples, and the result of their verification."""

    epoch: int
    samples: int
    verdict: str


def epochs_in_words(verdicts: Sequence[EpochVerdict]) -> list[str]:
    """Return one line for equal epochs in a row: "epochs 0 to 59: 96 samples each, exactly
    once"."""
    lines: list[str] = []
    for (samples, verdict), alike in itertools.groupby(verdicts, key=itemgetter(1, 2)):
        first, *others = alike
        counted = count(samples, "sample")
        if others:
            last = others[-1].epoch
            lines.append(f"epochs {first.epoch} to {last}: {counted} each, {verdict}")
        else:
            lines.append(f"epoch {first.epoch}: {counted} {verdict}")
    return lines


class EpochAccount:
    """The samples of one epoch.

    Args:
        epoch: its number.
        earlier: samples committed before this process started or resumed, on every rank.

    Attributes:
        epoch, earlier: as given.
        dropped: samples at the epoch's end that belong to no step.
    """

    def __init__(self, epoch: int, earlier: Receipt | None = None) -> None:
        self.epoch, self.earlier, self.dropped = epoch, earlier or Receipt(), 0
        self._planned, self._seen = self.earlier, Receipt()
        self._new_planned, self._new_seen = list[torch.Tensor](), list[int]()
        self._num_new = 0

    def add(self, planned: torch.Tensor, seen: Sequence[int]) -> None:
        """Count the samples of a step, as planned, int64, and those that this rank has run."""
        self._new_planned.append(planned)
        self._new_seen += seen
        self._num_new += len(planned)
        if self._num_new >= SUMMED_AT_ONCE:
            self._sum_up()

    @property
    def planned(self) -> Receipt:
        """The samples of all completed steps, computed from the order."""
        self._sum_up()
        return self._planned

    @property
    def seen(self) -> Receipt:
        """The samples that this rank has run and committed in this process."""
        self._sum_up()
        return self._seen

    def _sum_up(self) -> None:
        if self._new_planned:
            seen = torch.tensor(self._new_seen, dtype=torch.int64, device="cpu")
            self._planned += receipt_of(self.epoch, torch.cat(self._new_planned))
            self._seen += receipt_of(self.epoch, seen)
            self._new_planned, self._new_seen, self._num_new = [], [], 0


def receipt_of(epoch: int, ids: torch.Tensor) -> Receipt:
    """Return the receipt of some samples in an epoch; ids are int64 of shape [count]."""
    if not ids.numel():
        return Receipt()
    hashes = mix64(mix64(ids) ^ signed(derive("receipt", epoch)))
    return Receipt(ids.numel(), int(hashes.sum()) & MASK)
