"""A step's microbatches by rounds, one of each rank, and when their gradients are exchanged.

Either a rank runs neighbouring microbatches, adds up their gradients as far as the tree allows, and
exchanges what remains after the last round. Or the ranks take turns, so that a round's microbatches
are neighbours, and exchange after each: a shard's owner then keeps few nodes of a shard's size.
Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyrank.data.schedule import StepPlan
from anyrank.exact.tree_sum import Span, TreeSum, merged
from anyrank.world.ranks import Ranks


class Rounds:
    """The rounds of one step, and the current one; shared by all sums of a model.

    Args:
        plan: the step.
        ranks: the ranks with different data.
        is_interleaved: the ranks take turns.

    Attributes:
        count: K, the microbatches of the step.
        number: of the current round; -1 before the first.
    """

    def __init__(self, plan: StepPlan, ranks: Ranks, is_interleaved: bool) -> None:
        self.count, self.index = plan.num_microbatches, ranks.index
        self.is_interleaved = is_interleaved
        self.number = -1
        self._leaves = [
            [
                None if slot.is_copy else slot.k
                for slot in plan.slots(rank, ranks.size, is_interleaved)
            ]
            for rank in range(ranks.size)
        ]
        own = [leaf for leaf in self._leaves[self.index] if leaf is not None]
        self._own = range(own[0], own[-1] + 1) if own else range(0)
        # Once a step: each unit and group of parameters asks for them.
        self._spans = [self._spans_after(number) for number in range(len(self._leaves[0]))]

    @property
    def leaf(self) -> int | None:
        """This rank's microbatch; None for a copy, which is in no sum."""
        return self._leaves[self.index][self.number]

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self._leaves[self.index])

    @property
    def exchanges(self) -> bool:
        """Whether gradients are exchanged after the current round."""
        return self.is_interleaved or self.is_last

    def own(self) -> range:
        """This rank's microbatches whose gradients are exchanged next."""
        if not self.is_interleaved:
            return self._own
        return range(0) if self.leaf is None else range(self.leaf, self.leaf + 1)

    def add(self, own: TreeSum, term: torch.Tensor) -> None:
        """Add a term of the current microbatch; those before without a gradient have none."""
        if self.leaf is not None:
            own.skip_to(self.leaf, self.own().start)
            own.add(Span(self.leaf, self.leaf + 1), term)

    def complete(self, own: TreeSum) -> None:
        """Bring a sum to the nodes that `spans` tells of this rank, for the exchange."""
        own.skip_to(self.own().stop, self.own().start)

    def spans(self, number: int) -> list[list[Span]]:
        """The nodes that each rank holds when a round ends; none if it does not exchange then."""
        return self._spans[number]

    def _spans_after(self, number: int) -> list[list[Span]]:
        if self.is_interleaved:
            return [_spans_of(self.count, leaves[number : number + 1]) for leaves in self._leaves]
        is_last = number + 1 == len(self._leaves[0])
        return [_spans_of(self.count, leaves if is_last else []) for leaves in self._leaves]


def _spans_of(count: int, leaves: Sequence[int | None]) -> list[Span]:
    """The nodes over some leaves, in order; None is not a leaf."""
    return merged(count, (Span(leaf, leaf + 1) for leaf in leaves if leaf is not None))


def most_nodes(count: int, leaves: Sequence[int]) -> int:
    """The most nodes that a rank keeps at once while it adds up some leaves."""
    tree, most = TreeSum(count), 0
    for leaf in leaves:
        tree.add(Span(leaf, leaf + 1), None)
        most = max(most, len(tree.nodes))
    return most
