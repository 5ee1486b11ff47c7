"""The plan of who writes the tensors that ranks hold together; every rank computes it by itself."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from anyrank.sources.step_index import IndexedTensor, StepIndex
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spread import Spread
from anyrank.tensors.writes import PlannedTensor, WritePlan


def plan_writes(
    tensors: Sequence[ShardedTensor],
    spreads: Sequence[Spread],
    size: int,
    by_first: Container[str] = (),
) -> WritePlan:
    """Plan who writes what.

    Args:
        tensors: tensors as this rank holds them, in the same order on every rank.
        spreads: layout of each on the ranks.
        size: number of ranks.
        by_first: names of tensors whose parts are written by their first holders only, because
            they may differ between holders.
    """
    planned = [
        PlannedTensor(tensor.shape, tensor.dtype.itemsize, spread, tensor.name in by_first)
        for tensor, spread in zip(tensors, spreads, strict=True)
    ]
    return WritePlan(planned, size)


def index_of(
    tensors: Sequence[ShardedTensor],
    plan: WritePlan,
    by_first_alone: Sequence[ShardedTensor] = (),
    aliases: Mapping[str, str] | None = None,
) -> StepIndex:
    """Make the index of a step.

    Args:
        tensors: tensors of the plan.
        plan: plan of who writes what of them.
        by_first_alone: further tensors, which only the first rank writes.
        aliases: other name of a tied tensor -> the name under which it is saved.
    """
    rows: list[IndexedTensor] = []
    for number, tensor in enumerate(tensors):
        spread = plan.tensors[number].spread
        is_on_mesh = spread.axes and 0 not in tensor.shape
        where = spread if is_on_mesh else tuple(plan.writers(number))
        rows.append(IndexedTensor(tensor.name, tensor.shape, tensor.dtype, where))
    rows += [IndexedTensor(t.name, t.shape, t.dtype, (0,)) for t in by_first_alone]
    return StepIndex(rows, aliases or {})
