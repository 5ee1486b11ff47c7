"""FSDP2's gradient reduction in the order of the microbatches, through its public hooks.

FSDP2 calls its reduce-scatter in every backward. This one exchanges the round's microbatches and
keeps this rank's shard of the nodes; it returns zeros, and the total in the step's last backward.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anyrank.training.exact.ordered_reduce import OrderedGroup, all_gather, start_reduce_scatter
from anyrank.training.exact.rounds import Rounds
from anyrank.training.exact.tree_sum import Span, TreeSum
from anyrank.training.gradients.fsdp2 import parameter_groups
from anyrank.training.gradients.norm import sum_dtype
from anyrank.world.ranks import Ranks


class OrderedReduceScatter:
    """A unit's reduce-scatter, in the interface of `FSDPModule.set_custom_reduce_scatter`.

    Args:
        rounds: the rounds of the step, in which the ranks take turns.
        shards: the ranks that the unit is sharded over.
        replicas: the ranks that hold the same shard; None without replication.
    """

    def __init__(self, rounds: Rounds, shards: OrderedGroup, replicas: OrderedGroup | None) -> None:
        self.rounds, self.shards, self.replicas = rounds, shards, replicas
        self.kept = TreeSum(rounds.count)  # this rank's shard
        self.number = -1  # the last round with a gradient
        self.is_repeated = False  # there were several gradients in a round
        self.is_complete = True  # everything kept here was exchanged
        self.used: set[int] = set()  # the unit's parameters that a microbatch here has used
        self.without: set[int] = set()  # parameters that had no gradient before the pass

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
        """Add a microbatch's gradient; in the last round, return the sum of all."""
        if self.rounds.number == self.number:
            # The round's first gradient may have been exchanged when a second one comes.
            self.is_repeated = True
            output_tensor.zero_()
            return
        self.number = self.rounds.number
        self.is_complete = self.rounds.is_last
        term = input_tensor.to(sum_dtype(input_tensor.dtype))
        # `group` has the ranks of `shards`, and may be one that FSDP2 keeps for this.
        self.exchange(term, replace(self.shards, group=group))
        if self.rounds.is_last:
            self.deliver(output_tensor)
        else:
            output_tensor.zero_()

    def exchange(self, term: torch.Tensor, shards: OrderedGroup) -> None:
        """Add the round's microbatches, one from each rank; each rank gets its shard. Collective.

        Args:
            term: this rank's gradient, which may be overwritten; not part of a sum if it is a
                copy's.
            shards: the ranks.
        """
        own_sum = TreeSum(self.rounds.count)
        if (leaf := self.rounds.leaf) is not None:
            own_sum.add(Span(leaf, leaf + 1), term)
            if term.device.type != "cpu":
                # The term was allocated on the compute stream, and outlives FSDP2's own reference.
                # Without this call the memory could be reused too early: the sum is computed on
                # FSDP2's stream. Holding a reference instead would keep the memory to the end of
                # backward, where that stream is first waited for.
                term.record_stream(torch.accelerator.current_stream(term.device))
        spans_by_rank = self.rounds.unit_spans(self.number)
        shard_sum = start_reduce_scatter(own_sum, term, shards, spans_by_rank)()
        if self.replicas is not None:
            like = term[: term.numel() // shards.size]
            shard_sum = self.across_replicas(shard_sum, like, spans_by_rank)
        self.kept.skip_to(shard_sum.nodes[0][0].start)  # rounds in which the unit did not run
        self.kept.extend(shard_sum.nodes)
        if not self.rounds.is_last:
            self.kept.release()

    def across_replicas(
        self, shard_sum: TreeSum, like: torch.Tensor, spans_by_rank: Sequence[Sequence[Span]]
    ) -> TreeSum:
        """Add a shard over the ranks that hold the same one, each with a part. Collective.

        Args:
            shard_sum: this rank's nodes.
            like: a tensor that gives their shape, dtype and device.
            spans_by_rank: the nodes of each data-parallel rank.
        """
        assert self.replicas is not None
        extra = -like.numel() % self.replicas.size
        padded = TreeSum(shard_sum.count)
        for span, value in shard_sum.nodes:
            assert value is not None
            padded.add(span, nn.functional.pad(value, (0, extra)))
        like = nn.functional.pad(like, (0, extra))
        return start_reduce_scatter(padded, like, self.replicas, spans_by_rank)()

    def deliver(self, output: torch.Tensor) -> None:
        """Pass the whole sum to FSDP2."""
        total = self.kept.total()
        assert total is not None
        self.kept = TreeSum(self.rounds.count)
        if self.replicas is not None:
            whole = total.new_empty(total.numel() * self.replicas.size)
            total = all_gather(total, whole, self.replicas.group)[: output.numel()]
            # FSDP2 adds up the replicas' outputs afterwards: total + 0 + ... is the total.
            if dist.get_rank(self.replicas.group):
                total = total.zero_()
        output.copy_(total)


def unit_groups(
    parameter: Any, count: int, ranks: Ranks
) -> tuple[OrderedGroup, OrderedGroup | None]:
    """Return the groups over which a unit's gradients are reduced.

    Args:
        parameter: one of the unit's parameters, a DTensor on a mesh of one or two axes.
        count: K, the microbatches of the step.
        ranks: the ranks with different data, which are those of the mesh.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    members = dist.get_process_group_ranks
    places = {rank: index for index, rank in enumerate(ranks.ranks)}
    axis = next(i for i, placement in enumerate(placements) if placement.is_shard())
    group = mesh.get_group(axis)
    shards = OrderedGroup(group, count, [[places[rank]] for rank in members(group)])
    replicated = [i for i, placement in enumerate(placements) if placement.is_replicate()]
    if not replicated:
        return shards, None
    lines: list[list[int]] = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    line_of = {rank: [places[other] for other in line] for line in lines for rank in line}
    group = mesh.get_group(replicated[0])
    return shards, OrderedGroup(group, count, [line_of[rank] for rank in members(group)])


def reduction_dtype(parameter: Any) -> torch.dtype | None:
    """Return the dtype to which FSDP2 rounds a gradient before it is reduced.

    Args:
        parameter: FSDP2's record of a parameter, from a group's `fsdp_params`.

    Returns:
        None if gradients are reduced as they come: without mixed precision, and since torch 2.15
        with `MixedPrecisionPolicy(reduce_dtype=None)`, which until then meant `param_dtype`.
    """
    policy = parameter.mp_policy
    if policy.reduce_dtype is None and hasattr(type(parameter), "unsharded_grad_dtype"):
        return None
    return policy.reduce_dtype or policy.param_dtype


@contextmanager
def installed(
    unit: Any, group: Any, reduction: OrderedReduceScatter
) -> Generator[None, None, None]:
    """Make an FSDP2 module reduce with `reduction`, undivided.

    Args:
        unit: an FSDP2 module.
        group: its group of parameters, which stores the settings to restore, because torch has no
            public way to read them.
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
    """Make an FSDP2 module reduce its gradients in every backward; outside it must not."""
    before = [
        (group, group.reduce_grads, group.all_reduce_grads) for group in parameter_groups(unit)
    ]
    unit.set_requires_gradient_sync(True, recurse=False)
    try:
        yield
    finally:
        for group, reduces, all_reduces in before:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


@contextmanager
def watched(unit: Any, group: Any, reduction: OrderedReduceScatter) -> Generator[None, None, None]:
    """Record which of a unit's parameters get gradients. Collective over the unit's ranks.

    Args:
        unit: an FSDP2 module.
        group: its group of parameters, which has the tensors that autograd sees.
        reduction: the reduction that records it.
    """
    if not all(hasattr(parameter, "unsharded_param") for parameter in group.fsdp_params):
        unit.unshard()  # once: these tensors live as long as the module
        unit.reshard()
    hooks: list[Any] = []
    for number, parameter in enumerate(group.fsdp_params):
        if parameter.sharded_param.grad is None:
            reduction.without.add(number)
        if parameter.sharded_param.requires_grad:
            # FSDP2 sets it in the next forward, but the last one may have frozen the parameter.
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
