"""What the lanes have read of each epoch, equal on all ranks: the proof that each row came once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch

from anyrank.training.data.receipts import Receipt, receipt_of
from anyrank.training.streams.lanes import Report, Rows
from anyrank.wording import count

log = logging.getLogger("anyrank.data")


def _by_epoch(rows: Iterable[Rows]) -> dict[int, Receipt]:
    """The receipts of the rows of some ranges."""
    ids: dict[int, list[torch.Tensor]] = {}
    for epoch, shard, start, stop in rows:
        places = torch.arange((shard << 32) + start, (shard << 32) + stop, device="cpu")
        ids.setdefault(epoch, []).append(places)
    return {epoch: receipt_of(epoch, torch.cat(parts)) for epoch, parts in ids.items()}


def sum_of(rows: Iterable[Rows]) -> Receipt:
    """The receipt of all of them."""
    return reduce(add, _by_epoch(rows).values(), Receipt())


@dataclass
class EpochTally:
    """What was read of an epoch.

    Attributes:
        rows: that were read.
        whole: all rows of the shards that were read to their ends.
        num_shards: of these.
    """

    rows: Receipt = field(default_factory=Receipt)
    whole: Receipt = field(default_factory=Receipt)
    num_shards: int = 0


class Tally:
    """Counts of the epochs that have begun and are not over.

    Args:
        lengths: of the shards that this process has read to their ends.
    """

    def __init__(self, lengths: dict[int, int] | None = None) -> None:
        self.epochs: dict[int, EpochTally] = {}
        self.units_in = self.units_out = 0  # tokens of rows that were fed, and of outputs
        self.thin = self.steps = 0  # of the epoch: those less than half full, and all
        self.lengths = {} if lengths is None else lengths
        self._rows, self._ends = list[Rows](), list[tuple[int, int, int]]()  # not summed up yet

    def count_step(self, is_thin: bool) -> None:
        """A step of the epoch counts."""
        self.steps += 1
        self.thin += is_thin

    def add(self, reports: Sequence[Report]) -> None:
        """Note what lanes report, for `sum_up`."""
        for report in reports:
            self._rows += report.rows
            self._ends += report.ends
            self.units_in += report.units[0]
            self.units_out += report.units[1]

    def sum_up(self) -> Receipt:
        """Count what was noted; returns the receipt of the rows. Some 100 us, so not each step."""
        receipts = _by_epoch(self._rows)
        for epoch, receipt in receipts.items():
            self.epochs.setdefault(epoch, EpochTally()).rows += receipt
        for epoch, _, _ in self._ends:
            self.epochs.setdefault(epoch, EpochTally()).num_shards += 1
        whole = _by_epoch((epoch, shard, 0, rows) for epoch, shard, rows in self._ends)
        for epoch, receipt in whole.items():
            self.epochs[epoch].whole += receipt
        self._rows, self._ends = [], []
        return reduce(add, receipts.values(), Receipt())

    def find_changed(self, reports: Sequence[Report]) -> Iterator[tuple[int, int, int, int]]:
        """Shards that have other rows than before: epoch, shard, rows now, rows then."""
        for epoch, shard, rows in (end for report in reports for end in report.ends):
            before = self.lengths.setdefault(shard, rows)
            if before != rows:
                self.lengths[shard] = rows
                yield epoch, shard, rows, before

    def end(self, epoch: int, num_shards: int, num_lanes: int, flows: bool) -> str:
        """What is known of an epoch that is over; the next one is counted from here on.

        Args:
            epoch: its number.
            num_shards: of it.
            num_lanes: K.
            flows: whether tokens of two epochs may be in one row: these are not told then.
        """
        shards, tally = count(num_shards, "shard"), self.epochs.pop(epoch, EpochTally())
        tokens, packed = (0, 0) if flows else (self.units_in, self.units_out)
        thin, steps = self.thin, self.steps
        self.units_in = self.units_out = self.thin = self.steps = 0
        if tally.num_shards < num_shards or tally.rows != tally.whole or tokens != packed:
            return (
                f"not exactly once: {tally.rows.count:,} rows and {tokens:,} tokens were read, "
                f"{tally.num_shards} of {shards} have {tally.whole.count:,} rows, and {packed:,} "
                "tokens were given"
            )
        text = f"exactly once, {tally.whole.count:,} rows in {shards}"
        if tokens:
            text += f", {tokens:,} tokens"
        if thin:
            text += f", {thin} of {count(steps, 'step')} less than half full"
        if 4 * thin > steps:
            log.warning(
                "epoch %d: %s; the lanes of the epoch are of unequal length: give more and smaller "
                "shards (at least 20 for each of the %d microbatches of a step), or their lengths "
                "(anyrank.row_counts)%s",
                epoch,
                text,
                num_lanes,
                "" if flows else ", or tail='flow'",
            )
        return text

    def to_json(self) -> list[Any]:
        """Values of JSON."""
        epochs = [
            [epoch, tally.rows.to_json(), tally.whole.to_json(), tally.num_shards]
            for epoch, tally in sorted(self.epochs.items())
        ]
        return [epochs, self.units_in, self.units_out, self.thin, self.steps]

    @staticmethod
    def from_json(value: Any, lengths: dict[int, int] | None = None) -> Tally:
        """The inverse; raises ValueError or TypeError for anything else."""
        tally = Tally(lengths)
        epochs, *counts = value
        tally.units_in, tally.units_out, tally.thin, tally.steps = map(int, counts)
        for epoch, rows, whole, num_shards in epochs:
            tally.epochs[int(epoch)] = EpochTally(
                Receipt.from_json(rows), Receipt.from_json(whole), int(num_shards)
            )
        return tally
