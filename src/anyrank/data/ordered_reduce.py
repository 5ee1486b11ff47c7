"""Collectives that add up in the order of `tree_sum`, whatever the number of ranks.

Every rank holds the tree's nodes over its own microbatches. The owner of a shard gets all ranks'
nodes apart, in one all-to-all, and adds them up as the tree says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anyrank.data.tree_sum import Span, TreeSum, merged, ordered, sum_dtype


@dataclass(frozen=True)
class OrderedGroup:
    """The ranks of a process group, and the nodes that each of them holds.

    Attributes:
        group: the process group; None for the default one.
        count: K, the leaves of the whole tree.
        spans: of each rank, in the group's order.
    """

    group: Any
    count: int
    spans: Sequence[Sequence[Span]]

    @property
    def size(self) -> int:
        return len(self.spans)

    def result_spans(self) -> list[Span]:
        """The nodes that remain when all ranks' are added up."""
        return merged(self.count, sorted(span for spans in self.spans for span in spans))


def reduce_scatter(own: TreeSum, like: torch.Tensor, ordered_group: OrderedGroup) -> TreeSum:
    """Add up the nodes of all ranks of a group; each rank gets its shard. All ranks of the group.

    Args:
        own: this rank's nodes; flat tensors of size * shard elements.
        like: gives their shape, dtype and device.
        ordered_group: the ranks.

    Returns:
        Nodes of `shard` elements; one node, if the group's ranks have all leaves.
    """
    return start_reduce_scatter(own, like, ordered_group)()


def start_reduce_scatter(
    own: TreeSum, like: torch.Tensor, ordered_group: OrderedGroup
) -> Callable[[], TreeSum]:
    """Begin `reduce_scatter`; the result waits for its end."""
    size, index = ordered_group.size, dist.get_rank(ordered_group.group)
    assert own.spans() == list(ordered_group.spans[index])
    shard = like.numel() // size
    values = [torch.zeros_like(like) if value is None else value for _, value in own.nodes]
    parts = [value.view(size, 1, shard) for value in values]
    # The nodes for each owner; none on a rank that has no microbatch of a short step.
    sent = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else like.new_empty(0)
    counts = [len(spans) * shard for spans in ordered_group.spans]
    received = like.new_empty(sum(counts))
    work: Any = dist.all_to_all_single(
        received,
        sent.view(-1),
        counts,
        [len(parts) * shard] * size,
        group=ordered_group.group,
        async_op=True,
    )

    def finish() -> TreeSum:
        work.wait()
        trees: list[TreeSum] = []
        for spans, part in zip(ordered_group.spans, received.split(counts), strict=True):
            tree = TreeSum(ordered_group.count)
            for span, value in zip(spans, part.view(-1, shard), strict=True):
                tree.add(span, value)
            trees.append(tree)
        return ordered(trees, ordered_group.count)

    return finish


def all_reduce(own: TreeSum, like: torch.Tensor, ordered_group: OrderedGroup) -> torch.Tensor:
    """The sum of all leaves, on every rank of a group whose ranks have all of them. All ranks.

    Args:
        own: this rank's nodes; flat tensors of a multiple of the group's size.
        like: gives their shape, dtype and device.
        ordered_group: the ranks.
    """
    return start_all_reduce(own, like, ordered_group)()


def start_all_reduce(
    own: TreeSum, like: torch.Tensor, ordered_group: OrderedGroup
) -> Callable[[], torch.Tensor]:
    """Begin `all_reduce`; the result waits for its end."""
    reduced = start_reduce_scatter(own, like, ordered_group)

    def finish() -> torch.Tensor:
        root = reduced().total()
        assert root is not None
        whole = torch.empty_like(like)
        # torch 2.13 has a new name for it, and warns of the old one.
        names = vars(dist)
        gather = names.get("all_gather_single") or names["all_gather_into_tensor"]
        gather(whole, root, group=ordered_group.group)
        return whole

    return finish


def as_term(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in the dtype of sums."""
    return gradient.to(sum_dtype(gradient.dtype))
