"""The exchange of gradients with exact=True: the same bits on any number of ranks.

A microbatch's gradient depends on the weights, the microbatch and its random stream. Wrappers keep
theirs unreduced; the terms are added up in the order of `tree_sum`, which depends on the number of
microbatches alone. Parameters sharded by FSDP2 are summed by the unit (`exact_fsdp`), all others
from their `.grad` after each backward. Their exchange begins within the last backward, a group of
parameters at a time, in an order that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from anyrank.data.exact_checks import BufferWatch, check_wrappers
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
    put,
    units,
)
from anyrank.data.ordered_reduce import OrderedGroup, as_term, start_all_reduce
from anyrank.data.schedule import MicrobatchSlot, StepPlan
from anyrank.data.tree_sum import Span, TreeSum, merged, sum_dtype
from anyrank.world.ranks import Ranks

GROUP_BYTES = 4 << 20  # of gradients exchanged together


class ExactSync(GradientSync):
    """The exchange of one model's gradients in one pass over a step's microbatches.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data.
        group: the user's group of these ranks.
        plan: the step.
        is_first: check that the gradients are not exchanged already, and that the forward pass
            changes no buffer; exchange after the last backward then.
        repeating: models that get gradients several times in a microbatch, which this object finds.

    Raises:
        TypeError, ValueError: as `GradientSync`; a model whose sums cannot be ordered.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        group: Any,
        plan: StepPlan,
        is_first: bool,
        repeating: WeakSet[nn.Module],
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
            for name, parameter in self.named.items()
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
        self.groups = list(self.grouped())
        self.started: list[Callable[[], torch.Tensor]] = []  # what waits for each group's total
        # FSDP2's own collectives in the backward may not come between those of the groups.
        self.is_early = ranks.size > 1 and not is_first and not self.fsdp and model not in repeating
        self.repeating, self.is_repeated = repeating, False

    def trainable_units(self) -> Iterator[tuple[Any, Any]]:
        """The FSDP2 modules that train parameters, each with its group of parameters."""
        for unit in self.fsdp:
            for group in units(unit):
                if any(param.sharded_param.requires_grad for param in group.fsdp_params):
                    yield unit, group

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches: wrappers reduce as this object says."""
        if self.is_early:  # the groups are the same on all ranks
            rows = self.ranks.gather(bytes(map(self.state, self.summed)))
            check_trainable(list(self.summed), rows, self.ranks)
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
        is_early = is_last and self.is_early
        with self.starting_early() if is_early else nullcontext():
            yield
        if self.watch is not None:
            self.changed_buffers += self.watch.changed(self.model)
        if not is_early:
            self.add_terms()

    def add_terms(self) -> None:
        """Make the gradients of the microbatch terms of the sums."""
        for name, parameter in self.summed.items():
            gradient, parameter.grad = parameter.grad, None
            if self.now.leaf is not None:
                span = Span(self.now.leaf, self.now.leaf + 1)
                self.sums[name].add(span, term_of(name, gradient))

    @contextmanager
    def starting_early(self) -> Generator[None, None, None]:
        """Start the exchange of each group once the backward has all of its gradients, in order."""
        waiting = [set(names) for names in self.groups]
        place = {name: number for number, names in enumerate(self.groups) for name in names}

        def ready(name: str) -> None:
            if place[name] < len(self.started):
                self.is_repeated = True
                return
            waiting[place[name]].discard(name)
            while len(self.started) < len(waiting) and not waiting[len(self.started)]:
                self.started.append(self.start(self.groups[len(self.started)], is_early=True))

        hooks = [
            self.summed[name].register_post_accumulate_grad_hook(lambda _, name=name: ready(name))
            for name in place
            if self.summed[name].requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for names in self.groups[len(self.started) :]:
            self.started.append(self.start(names, is_early=True))

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
        rows = self.ranks.gather(
            (states, norm, complete, used, self.changed_buffers, repeated, self.is_repeated)
        )
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
        self.deliver_sums(set(names), any(row[6] for row in rows))
        for name in self.summed:
            self.restore(name)
        for (_, group, reduction), *there in zip(
            self.reductions, *(row[3] for row in rows), strict=True
        ):
            # FSDP2 gave zeros to parameters that no microbatch used: as without it, they have none.
            for number, param in enumerate(group.fsdp_params):
                if number in reduction.without and not any(number in used for used in there):
                    param.sharded_param.grad = None

    def deliver_sums(self, used: set[str], is_repeated: bool) -> None:
        """Make the sums the gradients of the parameters that any rank has used. All ranks.

        Args:
            used: their names.
            is_repeated: a rank got gradients of a group after its exchange had begun.
        """
        if self.ranks.size == 1:
            for name in used:
                self.deliver(name, self.sums.pop(name).total())
            return
        if is_repeated:
            self.repeating.add(self.model)
            for finish in self.started:
                finish()
            self.started.clear()
            self.add_terms()
        is_early = bool(self.started)
        for parameter in self.summed.values():
            parameter.grad = None
        for names in self.groups:
            finish = self.started.pop(0) if is_early else self.start(names, is_early=False)
            parts = [local(self.summed[name]) for name in names]
            total = finish()
            *places, _ = total.split([*(part.numel() for part in parts), self.padding(parts)])
            for name, part, place in zip(names, parts, places, strict=True):
                if name in used:
                    self.deliver(name, place.view(part.shape))

    def state(self, name: str) -> int:
        """Whether a parameter is frozen, or has a gradient in one of this rank's microbatches."""
        if not self.summed[name].requires_grad:
            return FROZEN
        has_term = any(value is not None for _, value in self.sums[name].nodes)
        has_last = self.summed[name].grad is not None and self.now.leaf is not None
        return GRADIENT if has_term or has_last else NO_GRADIENT

    def norm(self) -> float:
        """The sum of the squares of this rank's sums."""
        return sum(
            float(value.abs().double().square().sum())
            for tree in self.sums.values()
            for _, value in tree.nodes
            if value is not None
        )

    def grouped(self) -> Iterator[list[str]]:
        """Parameters whose gradients are exchanged together, as the backward comes to them."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in reversed(self.summed):
            if self.summed[name].requires_grad:
                part = local(self.summed[name])
                kinds.setdefault((sum_dtype(part.dtype), part.device), []).append(name)
        for (dtype, _), members in kinds.items():
            group: list[str] = []
            size = 0
            for name in members:
                group.append(name)
                size += local(self.summed[name]).numel() * dtype.itemsize
                if size >= GROUP_BYTES:
                    yield group
                    group, size = [], 0
            if group:
                yield group

    def start(self, names: Sequence[str], is_early: bool) -> Callable[[], torch.Tensor]:
        """Start to add up some parameters' sums over the ranks. All ranks.

        Args:
            names: of a group.
            is_early: the last microbatch's gradients are no terms yet. They and the sums are kept.

        Returns:
            What waits for the total.
        """
        parts = [local(self.summed[name]) for name in names]
        own = TreeSum(self.count)
        for number, (span, _) in enumerate(self.sums[names[0]].nodes):
            own.add(span, self.flat([self.sums[name].nodes[number][1] for name in names], parts))
        if is_early and self.now.leaf is not None:
            terms = [term_of(name, self.summed[name].grad) for name in names]
            own.add(Span(self.now.leaf, self.now.leaf + 1), self.flat(terms, parts))
        if not is_early:
            for name in names:
                del self.sums[name]
        like = self.flat([None] * len(parts), parts) if not own.nodes else None
        like = next((value for _, value in own.nodes if value is not None), like)
        assert like is not None
        group = OrderedGroup(self.group, self.count, self.spans)
        return start_all_reduce(own, like, group)

    def padding(self, parts: Sequence[torch.Tensor]) -> int:
        """Elements that a group needs for shards of one size."""
        return -sum(part.numel() for part in parts) % self.ranks.size

    def flat(
        self, values: Sequence[torch.Tensor | None], parts: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Values of a group's parameters in one tensor, a shard for each rank; zeros for None."""
        sizes = [*(part.numel() for part in parts), self.padding(parts)]
        flat = parts[0].new_empty(sum(sizes), dtype=sum_dtype(parts[0].dtype))
        for place, value in zip(flat.split(sizes), [*values, None], strict=True):
            if value is None:
                place.zero_()
            else:
                place.view(value.shape).copy_(value)
        return flat

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


def term_of(name: str, whole: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient as a term of the sum; ValueError for a sparse one, which is not added up."""
    if whole is None:
        return None
    gradient = local(whole)
    if gradient.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {gradient.layout}, which exact=True does not add up: "
            "build the module with sparse=False"
        )
    return as_term(gradient)
