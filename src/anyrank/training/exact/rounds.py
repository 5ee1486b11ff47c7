"""A step's microbatches in rounds, one from each rank, and when their gradients are exchanged.

Without FSDP2 a rank runs neighboring microbatches, adds up their gradients as far as the tree
allows, and exchanges the rest after the last one. FSDP2's units reduce gradients in each backward.
There the ranks take turns, so that a round's microbatches are neighbors, and units are exchanged
after each round: the owner of a shard then keeps few nodes of a shard's size. Both ways give the
same bits, and parameters outside of units can be summed either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from anyrank.training.data.schedule import StepPlan
from anyrank.training.exact.tree_sum import Span, TreeSum, merged
from anyrank.world.ranks import Ranks


class Rounds:
    """The rounds of one step, and the current one; shared by all sums of a model.

    Args:
        plan: the step.
        ranks: the ranks with different data.
        takes_turns: whether the ranks take turns.

    Attributes:
        count: K, the microbatches of the step.
        number: the current round; -1 before the first.
        is_last: whether it is this rank's last one.
        own_leaves: this rank's microbatches.
        whole_spans: the nodes that each rank holds when all rounds have run.
    """

    def __init__(self, plan: StepPlan, ranks: Ranks, takes_turns: bool) -> None:
        self.count, self.index = plan.num_microbatches, ranks.index
        self.takes_turns = takes_turns
        self.number, self.is_last = -1, False
        self._leaves = [
            [None if slot.is_copy else slot.k for slot in plan.slots(rank, ranks.size, takes_turns)]
            for rank in range(ranks.size)
        ]
        self.own_leaves = [leaf for leaf in self._leaves[self.index] if leaf is not None]
        # Computed once per step, because each unit and bucket asks for them.
        self.whole_spans = [_spans_of(self.count, leaves) for leaves in self._leaves]
        self._unit_spans = [
            [_spans_of(self.count, [leaf]) for leaf in row] if takes_turns else []
            for row in zip(*self._leaves, strict=True)
        ]

    @property
    def leaf(self) -> int | None:
        """This rank's microbatch; None for a copy, which is in no sum."""
        return self._leaves[self.index][self.number]

    def begin(self, k: int, is_last: bool) -> None:
        """Start the round of a microbatch; a single rank skips those without a sample."""
        self.number += 1
        while self.leaf is not None and self.leaf < k:
            self.number += 1
        self.is_last = is_last

    def unit_spans(self, number: int) -> list[list[Span]]:
        """Return each rank's nodes of a unit at the end of a round, if the ranks take turns."""
        return self._unit_spans[number]

    def add(self, sum_: TreeSum, term: torch.Tensor) -> None:
        """Add a term of the current microbatch; earlier ones without a gradient get none."""
        if self.leaf is not None:
            _skip(sum_, (leaf for leaf in self.own_leaves if leaf < self.leaf))
            sum_.add(Span(self.leaf, self.leaf + 1), term)

    def complete(self, sum_: TreeSum) -> None:
        """Bring a sum to the nodes that this rank's spans name, for the exchange."""
        _skip(sum_, self.own_leaves)


def _skip(sum_: TreeSum, leaves: Iterable[int]) -> None:
    """Append the leaves that come after a sum's nodes, without terms."""
    for leaf in leaves:
        if not sum_.nodes or sum_.nodes[-1][0].stop <= leaf:
            sum_.add(Span(leaf, leaf + 1), None)


def _spans_of(count: int, leaves: Sequence[int | None]) -> list[Span]:
    """Return the nodes over some leaves, in order; None is not a leaf."""
    return merged(count, (Span(leaf, leaf + 1) for leaf in leaves if leaf is not None))
