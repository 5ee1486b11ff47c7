"""The exchange of gradients with exact=True: the same bits on any number of ranks.

A microbatch's gradient depends on the weights, the microbatch and its random stream. Wrappers keep
theirs unreduced; the terms are added up in the order of `tree_sum`, which depends on the number of
microbatches alone. Parameters sharded by FSDP2 are summed by the unit (`exact_fsdp`), all others
from their `.grad` after each backward, in one exchange after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.data.exact_checks import BufferWatch
from anyrank.data.exact_fsdp import (
    OrderedReduceScatter,
    Round,
    exchanging,
    installed,
    unit_groups,
    watched,
)
from anyrank.data.gradient_sync import (
    FROZEN,
    GRADIENT,
    NO_GRADIENT,
    GradientSync,
    check_not_exchanged,
    check_trainable,
    local,
    units,
)
from anyrank.data.ordered_reduce import OrderedGroup, all_reduce, as_term
from anyrank.data.schedule import MicrobatchSlot, StepPlan
from anyrank.data.tree_sum import Span, TreeSum, merged, sum_dtype
from anyrank.world.ranks import Ranks

BUCKET_BYTES = 25 << 20  # of gradients exchanged together


class ExactSync(GradientSync):
    """The exchange of one model's gradients in one pass over a step's microbatches.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data.
        group: the user's group of these ranks.
        plan: the step.
        is_first: check that the gradients are not exchanged already, and that the forward pass
            changes no buffer.

    Raises:
        TypeError, ValueError: as `GradientSync`; a model whose sums cannot be ordered.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, group: Any, plan: StepPlan, is_first: bool
    ) -> None:
        super().__init__(model, ranks)
        check_wrappers(self, ranks)
        self.model, self.ranks, self.group = model, ranks, group
        self.watch = BufferWatch(model) if is_first else None
        self.changed_buffers: list[str] = []
        self.count = plan.num_microbatches
        leaves = [
            [slot.k for slot in plan.slots(index, ranks.size) if not slot.is_copy]
            for index in range(ranks.size)
        ]
        self.spans = [merged(self.count, (Span(k, k + 1) for k in part)) for part in leaves]
        self.now = Round()
        reduced: set[int] = set()
        self.reductions: list[tuple[Any, Any, OrderedReduceScatter]] = []
        if ranks.size > 1:  # FSDP2 reduces nothing on one rank
            by_rank = dict(zip(ranks.ranks, self.spans, strict=True))
            own = leaves[ranks.index]
            for unit, unit_group in self.trainable_units():
                parameter = unit_group.fsdp_params[0].sharded_param
                groups = unit_groups(parameter, self.count, by_rank)
                reduction = OrderedReduceScatter(self.now, own, *groups)
                self.reductions.append((unit, unit_group, reduction))
                reduced |= {id(param.sharded_param) for param in unit_group.fsdp_params}
        # Frozen ones too: ranks that freeze different parameters must still meet, and compare.
        self.summed = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in reduced
        }
        self.sums = {name: TreeSum(self.count) for name in self.summed}
        self.rounded: dict[int, torch.dtype] = {
            id(parameter.sharded_param): policy.reduce_dtype or policy.param_dtype
            for _, unit_group in self.trainable_units()
            for policy in (unit_group.mp_policy,)
            if policy.reduce_dtype or policy.param_dtype
            for parameter in unit_group.fsdp_params
        }
        self.earlier: dict[str, torch.Tensor] = {}  # gradients from before this pass

    def trainable_units(self) -> Iterator[tuple[Any, Any]]:
        """The FSDP2 modules that train parameters, each with its group of parameters."""
        for unit in self.fsdp:
            for group in units(unit):
                if any(param.sharded_param.requires_grad for param in group.fsdp_params):
                    yield unit, group

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches: wrappers reduce as this object says."""
        with ExitStack() as stack:
            for module in self.ddp:
                # A forward outside of the pass has prepared DDP to exchange in the next backward,
                # whatever no_sync() says then.
                module.reducer._reset_state()  # pyright: ignore[reportPrivateUsage]
                stack.enter_context(module.no_sync())
            for module in self.fsdp:
                stack.enter_context(exchanging(module))
            for unit, group, reduction in self.reductions:
                stack.enter_context(installed(unit, group, reduction))
                stack.enter_context(watched(unit, group, reduction))
            for name, parameter in self.summed.items():
                if parameter.grad is not None:
                    self.earlier[name] = local(parameter.grad)
                    parameter.grad = None
            yield

    @contextmanager
    def on(self, slot: MicrobatchSlot, is_last: bool) -> Generator[None, None, None]:
        """Run forward and backward of a microbatch, whose gradient becomes a term of the sum."""
        self.now.number += 1
        self.now.leaf, self.now.is_last = None if slot.is_copy else slot.k, is_last
        yield
        if self.watch is not None:
            self.changed_buffers += self.watch.changed(self.model)
        for name, parameter in self.summed.items():
            gradient, parameter.grad = parameter.grad, None
            if slot.is_copy:
                continue
            term = None if gradient is None else as_term(checked(name, local(gradient)))
            self.sums[name].add(Span(slot.k, slot.k + 1), term)

    def drop_unfinished(self) -> None:
        """Drop the terms, and restore the gradients from before the pass, which was not ended."""
        for name, parameter in self.summed.items():
            parameter.grad = None
            self.restore(name)

    def restore(self, name: str) -> None:
        """Restore a parameter's gradient from before the pass, if it had one."""
        if name in self.earlier:
            put(self.summed[name], self.earlier.pop(name))

    def has_gradients(self) -> bool:
        return self.norm() > 0 or super().has_gradients()

    def finish(self, ranks: Ranks, group: Any, factor: float | None, is_first: bool) -> bool:
        """Exchange the sums, then scale them. All data-parallel ranks, after the last microbatch.

        Arguments, result and errors are those of `GradientSync.finish`.

        Raises:
            ValueError: an FSDP2 module was not part of the last microbatch, or got gradients
                several times in one.
        """
        self.exchange_sums(is_first)
        if factor is not None:
            self.scale(factor)
        return True

    def exchange_sums(self, is_first: bool) -> None:
        """Deliver the sum of each parameter's terms. All ranks."""
        states = bytes(self.state(name) for name in self.summed)
        complete = [reduction.is_complete for _, _, reduction in self.reductions]
        used = [reduction.used for _, _, reduction in self.reductions]
        norm = self.norm() if is_first else 0.0
        repeated = any(reduction.is_repeated for _, _, reduction in self.reductions)
        rows = self.ranks.gather((states, norm, complete, used, self.changed_buffers, repeated))
        if changed := {name for row in rows for name in row[4]}:
            raise ValueError(
                f"exact=True: the forward pass changes the buffers {sorted(changed)[:8]}, so each "
                "rank has those of its own microbatches: use a module without such state, as "
                "LayerNorm for BatchNorm, or update it outside of the loop over microbatches"
            )
        check_trainable(list(self.summed), [row[0] for row in rows], self.ranks)
        if any(False in row[2] for row in rows):
            raise ValueError(
                "exact=True: an FSDP2 module has gradients in some microbatches, and was not part "
                "of the last one: run the same modules in every microbatch"
            )
        if any(row[5] for row in rows):
            raise ValueError(
                "exact=True: an FSDP2 module got gradients more than once in a microbatch: add up "
                "the losses for one step.backward, and run each module that fully_shard wraps "
                "inside of another once in it, or wrap the outermost module alone"
            )
        check_not_exchanged([row[1] for row in rows])
        every = zip(self.summed, *(row[0] for row in rows), strict=True)
        names = [name for name, *there in every if GRADIENT in there]
        if self.ranks.size == 1:
            for name in names:
                self.deliver(name, self.sums.pop(name).total())
        else:
            for bucket in self.buckets(names):
                self.exchange(bucket)
        for name in self.summed:
            self.restore(name)
        for (_, group, reduction), *there in zip(
            self.reductions, *(row[3] for row in rows), strict=True
        ):
            # FSDP2 gave zeros to parameters that no microbatch used: as without it, they have none.
            for number, param in enumerate(group.fsdp_params):
                if number in reduction.without and not any(number in used for used in there):
                    param.sharded_param.grad = None

    def state(self, name: str) -> int:
        """Whether a parameter is frozen, or has a gradient in one of this rank's microbatches."""
        if not self.summed[name].requires_grad:
            return FROZEN
        has_term = any(value is not None for _, value in self.sums[name].nodes)
        return GRADIENT if has_term else NO_GRADIENT

    def norm(self) -> float:
        """The sum of the squares of this rank's sums."""
        return sum(
            float(value.abs().double().square().sum())
            for tree in self.sums.values()
            for _, value in tree.nodes
            if value is not None
        )

    def buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Parameters whose gradients are exchanged together: of one dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in names:
            part = local(self.summed[name])
            kinds.setdefault((sum_dtype(part.dtype), part.device), []).append(name)
        for (dtype, _), members in kinds.items():
            bucket: list[str] = []
            size = 0
            for name in members:
                bucket.append(name)
                size += local(self.summed[name]).numel() * dtype.itemsize
                if size >= BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def exchange(self, names: Sequence[str]) -> None:
        """Add up some parameters' sums over the ranks, and deliver them. All ranks."""
        parts = [local(self.summed[name]) for name in names]
        sizes = [part.numel() for part in parts]
        extra = -sum(sizes) % self.ranks.size  # a shard for each rank
        like = parts[0].new_empty(sum(sizes) + extra, dtype=sum_dtype(parts[0].dtype))
        own = TreeSum(self.count)
        trees = [self.sums.pop(name) for name in names]
        for number, span in enumerate(self.spans[self.ranks.index]):
            values = [tree.nodes[number][1] for tree in trees]
            flat = torch.empty_like(like)
            *places, padding = flat.split([*sizes, extra])
            padding.zero_()
            for place, value in zip(places, values, strict=True):
                if value is None:
                    place.zero_()
                else:
                    place.view(value.shape).copy_(value)
            own.add(span, flat)
        total = all_reduce(own, like, OrderedGroup(self.group, self.count, self.spans))
        *places, _ = total.split([*sizes, extra])
        for name, part, place in zip(names, parts, places, strict=True):
            self.deliver(name, place.view(part.shape))

    def deliver(self, name: str, total: torch.Tensor | None) -> None:
        """Make a sum the parameter's gradient, or add it to the one from before the pass."""
        assert total is not None
        parameter = self.summed[name]
        # Several ranks would get the total from FSDP2 in the dtype of its reduction.
        total = total.to(self.rounded.get(id(parameter), total.dtype))
        earlier = self.earlier.pop(name, None)
        if earlier is None:
            like = local(parameter.detach())
            # With the strides of the parameter, as autograd would give it.
            fits = total.dtype == like.dtype and total.stride() == like.stride()
            earlier = total if fits else torch.empty_like(like).copy_(total)
        else:
            earlier.add_(total)
        put(parameter, earlier)


def put(parameter: Any, part: torch.Tensor) -> None:
    """Make a tensor this rank's part of the parameter's gradient."""
    if isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = part


def checked(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that can be added up in order; ValueError for a sparse one."""
    if gradient.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {gradient.layout}, which exact=True does not add up: "
            "build the module with sparse=False"
        )
    return gradient


def check_wrappers(sync: GradientSync, ranks: Ranks) -> None:
    """Refuse wrappers whose reductions cannot be ordered.

    Raises:
        ValueError: names the wrapper, and the way out.
    """
    for module in sync.ddp:
        if module.static_graph:
            raise ValueError(
                "exact=True: DistributedDataParallel(static_graph=True) reduces gradients in its "
                "first backward in an order of its own: build it with static_graph=False"
            )
        if module._comm_hooks:  # pyright: ignore[reportPrivateUsage]
            raise ValueError(
                "exact=True: a communication hook is registered on DistributedDataParallel, and "
                "would not be called: build it without register_comm_hook"
            )
        if set(dist.get_process_group_ranks(module.process_group)) != set(ranks.ranks):
            raise ValueError(
                "exact=True: DistributedDataParallel reduces over other ranks than those of the "
                f"data, {ranks.ranks}: give the loader its process_group"
            )
