"""FSDP2's gradient reduction in the order of the microbatches, through its public hooks.

FSDP2 calls its reduce-scatter in every backward. The one here keeps the microbatch's gradient and
returns zeros, and in the step's last backward exchanges what was kept and returns the total.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from anyrank.data.gradient_sync import units
from anyrank.data.ordered_reduce import OrderedGroup, all_reduce, as_term, reduce_scatter
from anyrank.data.tree_sum import Span, TreeSum, merged


@dataclass
class Round:
    """Which microbatch runs; shared by all units.

    Attributes:
        number: how many this rank has begun in the pass.
        leaf: its index in the step; None for a copy, which is in no sum.
        is_last: whether it is the rank's last.
    """

    number: int = 0
    leaf: int | None = None
    is_last: bool = False


class OrderedReduceScatter:
    """A unit's reduce-scatter, in the interface of `FSDPModule.set_custom_reduce_scatter`.

    Args:
        now: which microbatch runs.
        leaves: this rank's microbatches.
        shards: the ranks that the unit is sharded over.
        replicas: the ranks that hold the same shard; None without replication.
    """

    def __init__(
        self,
        now: Round,
        leaves: Sequence[int],
        shards: OrderedGroup,
        replicas: OrderedGroup | None,
    ) -> None:
        self.now, self.leaves, self.shards, self.replicas = now, leaves, shards, replicas
        self.own = TreeSum(shards.count)
        self.num_added = 0
        self.number = 0  # of the last microbatch with a gradient
        self.is_repeated = False  # there were several gradients in a microbatch
        self.is_complete = True  # nothing is kept that was not exchanged
        self.used: set[int] = set()  # the unit's parameters that a microbatch here has used
        self.without: set[int] = set()  # those that had no gradient before the pass

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Keep a microbatch's gradient; in the last one, reduce-scatter the sum of all."""
        if self.now.number == self.number:
            # The last microbatch's first gradient is exchanged when a second comes.
            self.is_repeated = True
            output_tensor.zero_()
            return
        self.number = self.now.number
        term = as_term(input_tensor)
        self.is_complete = self.now.is_last
        if self.now.leaf is not None:
            self.add_up_to(self.now.leaf, term)
        if not self.now.is_last:
            output_tensor.zero_()
            return
        self.add_up_to(self.shards.count, None)
        # `group` has the ranks of `shards`, and may be one that FSDP2 keeps for this.
        shards = replace(self.shards, group=group)
        found = reduce_scatter(self.own, torch.empty_like(term), shards)
        self.own = TreeSum(self.shards.count)
        if self.replicas is None:
            total = found.total()
        else:
            total = self.across_replicas(found, output_tensor, term.dtype)
            # FSDP2 adds up the replicas' outputs afterwards: total + 0 + ... is the total.
            if dist.get_rank(self.replicas.group):
                total = total.zero_()
        assert total is not None
        output_tensor.copy_(total)

    def across_replicas(
        self, found: TreeSum, output: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The sum of a shard over the ranks that hold the same one. All of them."""
        assert self.replicas is not None
        extra = -output.numel() % self.replicas.size
        padded = TreeSum(found.count)
        for span, value in found.nodes:
            assert value is not None
            padded.add(span, nn.functional.pad(value, (0, extra)))
        like = output.new_empty(output.numel() + extra, dtype=dtype)
        return all_reduce(padded, like, self.replicas)[: output.numel()]

    def add_up_to(self, leaf: int, term: torch.Tensor | None) -> None:
        """Add a microbatch's term; those before it in which the unit did not run have none."""
        while self.num_added < len(self.leaves) and self.leaves[self.num_added] < leaf:
            self._add(self.leaves[self.num_added], None)
        if term is not None:
            if term.device.type != "cpu":
                # It was allocated on the compute stream, and outlives FSDP2's own reference.
                term.record_stream(torch.accelerator.current_stream(term.device))
            self._add(leaf, term)

    def _add(self, leaf: int, term: torch.Tensor | None) -> None:
        self.own.add(Span(leaf, leaf + 1), term)
        self.num_added += 1


def unit_groups(
    parameter: Any, count: int, spans: dict[int, list[Span]]
) -> tuple[OrderedGroup, OrderedGroup | None]:
    """The groups over which a unit's gradients are reduced.

    Args:
        parameter: one of the unit, a DTensor on a mesh of one or two axes.
        count: K, the microbatches of the step.
        spans: global rank -> the nodes that it holds after its microbatches.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    axis = next(i for i, placement in enumerate(placements) if isinstance(placement, Shard))
    group = mesh.get_group(axis)
    shards = OrderedGroup(group, count, [spans[rank] for rank in group_ranks(group)])
    replicated = [i for i, placement in enumerate(placements) if isinstance(placement, Replicate)]
    if not replicated:
        return shards, None
    lines: list[list[int]] = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    results = {
        rank: merged(count, sorted(span for other in line for span in spans[other]))
        for line in lines
        for rank in line
    }
    group = mesh.get_group(replicated[0])
    return shards, OrderedGroup(group, count, [results[rank] for rank in group_ranks(group)])


def group_ranks(group: Any) -> list[int]:
    """Global ranks of a process group, in its order."""
    return dist.get_process_group_ranks(group)


@contextmanager
def installed(
    unit: Any, group: Any, reduction: OrderedReduceScatter
) -> Generator[None, None, None]:
    """Let an FSDP2 module reduce with `reduction`, undivided.

    Args:
        unit: an FSDP2 module.
        group: its group of parameters, which knows the settings to restore: torch has no public
            way to read them.
        reduction: the reduce-scatter.
    """
    before = (
        group._reduce_scatter_comm,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        group.reduce_scatter_unused_params,
    )
    unit.set_custom_reduce_scatter(reduction)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    # All microbatches' gradients then have the same layout.
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    try:
        yield
    finally:
        unit.set_custom_reduce_scatter(before[0])
        unit.set_gradient_divide_factor(before[1])
        unit.set_force_sum_reduction_for_comms(before[2])
        unit.set_reduce_scatter_unused_params(before[3], recurse=False)


@contextmanager
def exchanging(unit: Any) -> Generator[None, None, None]:
    """Let an FSDP2 module reduce its gradients in every backward, as it may not do outside.

    There is no public way to read the former settings, which are restored.
    """
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in units(unit)]
    unit.set_requires_gradient_sync(True, recurse=False)
    try:
        yield
    finally:
        for group, reduces, all_reduces in before:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


@contextmanager
def watched(unit: Any, group: Any, reduction: OrderedReduceScatter) -> Generator[None, None, None]:
    """Record which of a unit's parameters get gradients. All ranks of the unit.

    Args:
        unit: an FSDP2 module.
        group: its group of parameters, which has the tensors that autograd sees.
        reduction: where it is recorded.
    """
    if not all(hasattr(parameter, "unsharded_param") for parameter in group.fsdp_params):
        unit.unshard()  # once: these tensors live as long as the module
        unit.reshard()
    hooks: list[Any] = []
    for number, parameter in enumerate(group.fsdp_params):
        if parameter.sharded_param.grad is None:
            reduction.without.add(number)
        if parameter.sharded_param.requires_grad:
            # FSDP2 sets it in the next forward: the parameter may have been frozen in the last.
            parameter.unsharded_param.requires_grad_(True)
            hooks.append(
                parameter.unsharded_param.register_post_accumulate_grad_hook(
                    lambda _, number=number: reduction.used.add(number)
                )
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
