"""Divides an epoch into steps, a step into microbatches, and microbatches among ranks.

Pure arithmetic on positions in the epoch's order. Only `slots_of_rank` depends on the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from anyrank.checks import check_choice, check_int
from anyrank.training.data.order import Order
from anyrank.wording import count

Tail = Literal["short", "drop"]


@dataclass(frozen=True)
class MicrobatchSlot:
    """One microbatch that a rank runs.

    Attributes:
        k: index of the microbatch in the step.
        is_copy: runs with weight 0, only for the collectives: the microbatch is in another slot.
    """

    k: int
    is_copy: bool


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step of the run.

    Attributes:
        epoch: counted from 0.
        number: steps of the run before this one.
        start: first position in the epoch's order.
        stop: position after its last sample.
        microbatch: samples in each microbatch but the last.
        cuts: positions at which its microbatches start and end, if they are not of that size.
    """

    epoch: int
    number: int
    start: int
    stop: int
    microbatch: int
    cuts: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in the step."""
        return self.stop - self.start

    @property
    def assumed_samples(self) -> int:
        """Divisor of losses until the number of samples is known: this number, if it is planned."""
        return self.samples

    @property
    def num_microbatches(self) -> int:
        return len(self.cuts) - 1 if self.cuts else -(-self.samples // self.microbatch)

    def bounds(self, k: int) -> tuple[int, int]:
        """Return the positions [start, stop) of microbatch k."""
        if self.cuts:
            return self.cuts[k], self.cuts[k + 1]
        start = self.start + k * self.microbatch
        return start, min(start + self.microbatch, self.stop)

    def size(self, k: int) -> int:
        """Return the number of samples in microbatch k."""
        start, stop = self.bounds(k)
        return stop - start

    def slots(self, rank: int, size: int, takes_turns: bool = False) -> tuple[MicrobatchSlot, ...]:
        """Return the microbatches that one of `size` ranks runs."""
        return slots_of_rank(self.num_microbatches, rank, size, takes_turns)


@functools.lru_cache(maxsize=16)  # each step needs them several times
def slots_of_rank(
    count: int, rank: int, size: int, takes_turns: bool = False
) -> tuple[MicrobatchSlot, ...]:
    """Return one rank's balanced part of `count` microbatches, and copies to fill it up.

    Every rank gets the same number of slots, so that collectives in forward and backward match.

    Args:
        count: number of the step's microbatches.
        rank: its index.
        size: number of ranks.
        takes_turns: the ranks take turns; otherwise a rank's microbatches are neighbors.
    """
    bounds = rank * count // size, (rank + 1) * count // size
    ks = range(rank, count, size) if takes_turns else range(*bounds)
    # A real microbatch has a valid shape, and values as finite as those of the step.
    copied = ks[-1] if ks else bounds[0]
    copies = -(-count // size) - len(ks)
    return *(MicrobatchSlot(k, False) for k in ks), *[MicrobatchSlot(copied, True)] * copies


@dataclass(frozen=True)
class Schedule:
    """The constants of a run's data plan.

    Attributes:
        order: order of the samples.
        global_batch: samples of a step.
        microbatch: samples of one forward pass; divides `global_batch`.
        tail: treatment of the samples that do not fill an epoch's last step.
    """

    order: Order
    global_batch: int
    microbatch: int
    tail: Tail

    def __post_init__(self) -> None:
        for name in ("global_batch", "microbatch"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1))
        check_choice("tail", self.tail, get_args(Tail))
        if self.global_batch % self.microbatch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of microbatch "
                f"{self.microbatch}. It must be, because all microbatches have the same size."
            )
        if self.order.n < 1:
            raise ValueError("the dataset is empty, so there is nothing to train on")
        if self.tail == "drop" and self.order.n < self.global_batch:
            raise ValueError(
                f"tail='drop' would drop all {self.order.n} samples, fewer than global_batch "
                f"{self.global_batch}. Use tail='short', or lower global_batch."
            )

    def arguments(self) -> dict[str, object]:
        """Return the inputs of the plan, by the loader's argument, to compare between ranks."""
        return self.order.arguments() | {
            "global_batch": self.global_batch,
            "microbatch": self.microbatch,
            "tail": self.tail,
        }

    @property
    def num_microbatches(self) -> int:
        """K, the number of microbatches of a full step."""
        return self.global_batch // self.microbatch

    @property
    def steps_in_epoch(self) -> int:
        """Number of steps of a whole epoch."""
        blocks, size = self.order.num_blocks, self.num_microbatches
        full, left = divmod(self.order.n, self.global_batch)
        if blocks is not None:
            full, left = divmod(blocks, size)
        return full + (left > 0 and self.tail != "drop")

    def check_size(self, size: int) -> None:
        """Raise ValueError if a full step has fewer microbatches than `size` ranks."""
        if size > self.num_microbatches:
            most = self.global_batch // size
            hint = f"lower microbatch to at most {most}, " if most else ""
            hint += f"raise global_batch to at least {size * self.microbatch}, or use at most "
            hint += count(self.num_microbatches, "rank")
            raise ValueError(
                f"global_batch {self.global_batch} / microbatch {self.microbatch} gives "
                f"{count(self.num_microbatches, 'microbatch', 'microbatches')}, too few for {size} "
                f"data-parallel ranks: {hint}."
            )

    def next_step(self, epoch: int, number: int, consumed: int) -> StepPlan | None:
        """Return the step at position `consumed` of an epoch; None at the end of the epoch."""
        if self.order.num_blocks is not None:
            cuts = self.order.cuts(consumed, self.num_microbatches)
            if len(cuts) < 2 or (len(cuts) <= self.num_microbatches and self.tail == "drop"):
                return None
            return StepPlan(epoch, number, consumed, cuts[-1], self.microbatch, cuts)
        n = self.order.n
        stop = consumed + self.global_batch
        if consumed >= n or (stop > n and self.tail == "drop"):
            return None
        return StepPlan(epoch, number, consumed, min(stop, n), self.microbatch)

    def following(self, step: StepPlan) -> StepPlan | None:
        """Return the step after a step; None at the end of its epoch."""
        return self.next_step(step.epoch, step.number + 1, step.stop)

    def rest(self, step: StepPlan) -> Iterator[StepPlan]:
        """Yield a step and the following steps of its epoch."""
        current: StepPlan | None = step
        while current is not None:
            yield current
            current = self.following(current)

    def ids(self, step: StepPlan, k: int) -> list[int]:
        """Return the sample ids of one microbatch."""
        return self.order.ids(step.epoch, *step.bounds(k)).tolist()
