"""Collectives that add in the order of `tree_sum`, whatever the number of ranks.

Every rank holds the tree's nodes over its own microbatches. The owner of a shard gets all ranks'
nodes separately, in one all-to-all, and adds them up in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anyrank.training.exact.tree_sum import Span, TreeSum, merged, ordered


@dataclass(frozen=True)
class OrderedGroup:
    """The ranks of a process group, with the data-parallel ranks whose nodes each of them holds.

    Attributes:
        group: the process group; None for the default one.
        count: K, the leaves of the whole tree.
        lines: for each rank of the group, in its order: the data-parallel ranks, by index, whose
            nodes it has added up.
    """

    group: Any
    count: int
    lines: Sequence[Sequence[int]]

    @property
    def size(self) -> int:
        return len(self.lines)

    def spans(self, spans_by_rank: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """Return the nodes of each rank of the group, from those of every data-parallel rank."""
        return [
            merged(self.count, sorted(span for index in line for span in spans_by_rank[index]))
            for line in self.lines
        ]


def start_reduce_scatter(
    own_sum: TreeSum,
    like: torch.Tensor,
    ordered_group: OrderedGroup,
    spans_by_rank: Sequence[Sequence[Span]],
) -> Callable[[], TreeSum]:
    """Start to add the nodes of a group's ranks; each gets its shard. Collective over the group.

    Args:
        own_sum: this rank's nodes; flat tensors of size * shard elements.
        like: a tensor that gives their shape, dtype and device.
        ordered_group: the ranks.
        spans_by_rank: the nodes of each data-parallel rank.

    Returns:
        A function that waits for nodes of `shard` elements; one node, if the ranks have all leaves.
    """
    size, index = ordered_group.size, dist.get_rank(ordered_group.group)
    spans = ordered_group.spans(spans_by_rank)
    assert own_sum.spans() == spans[index]
    shard = like.numel() // size
    values = [torch.zeros_like(like) if value is None else value for _, value in own_sum.nodes]
    parts = [value.view(size, 1, shard) for value in values]
    # The nodes for each owner; none on a rank that has no microbatch of a short step.
    sent = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else like.new_empty(0)
    counts = [len(rank_spans) * shard for rank_spans in spans]
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
        for rank_spans, part in zip(spans, received.split(counts), strict=True):
            tree = TreeSum(ordered_group.count)
            tree.extend(zip(rank_spans, part.view(-1, shard), strict=True))
            trees.append(tree)
        return ordered(trees, ordered_group.count)

    return finish


def all_gather(shard: torch.Tensor, whole: torch.Tensor, group: Any) -> torch.Tensor:
    """Fill a tensor with the shards of all ranks of a group. Collective over the group."""
    # torch 2.13 renamed it, and warns about the old name.
    names = vars(dist)
    gather = names.get("all_gather_single") or names["all_gather_into_tensor"]
    gather(whole, shard, group=group)
    return whole
