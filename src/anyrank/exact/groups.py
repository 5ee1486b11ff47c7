"""The ordered sums of parameters that FSDP2 does not reduce, from their `.grad`.

A gradient is taken from the parameter as it comes, and added to what this rank has. Sums are
exchanged by groups of parameters, in an order that is the same on all ranks: after a backward, or
within it as soon as a group's gradients are there. What was sent is not kept: the totals are
written over it. So a parameter may get one gradient in a microbatch; further ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from anyrank.exact.checks import sparse_gradient
from anyrank.exact.ordered_reduce import OrderedGroup, all_gather, start_reduce_scatter
from anyrank.exact.rounds import Rounds
from anyrank.exact.tree_sum import TreeSum
from anyrank.steps.gradient_sync import FROZEN, GRADIENT, NO_GRADIENT, local, put
from anyrank.steps.norm import sum_dtype

GROUP_BYTES = 4 << 20  # of gradients exchanged together
MAX_STARTED = 2  # groups in flight, each in two copies or more


class GradientGroup:
    """Sums of parameters whose gradients are exchanged together, as one tensor.

    Args:
        parameters: of one dtype and device, by name.
        rounds: of the step.
        ranks: the data-parallel ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], rounds: Rounds, ranks: OrderedGroup
    ) -> None:
        self.rounds, self.ranks = rounds, ranks
        self.parts = {name: local(param.detach()) for name, param in parameters.items()}
        sizes = [part.numel() for part in self.parts.values()]
        self.sizes = [*sizes, -sum(sizes) % ranks.size]  # a shard for each rank
        self.own = self.no_terms()
        self.kept = TreeSum(rounds.count)  # this rank's shard
        self.sent: torch.Tensor | None = None
        self.finish: Callable[[], TreeSum] | None = None  # waits for the exchange

    def no_terms(self) -> dict[str, TreeSum]:
        """A sum for each parameter, of what this rank adds until the next exchange."""
        return {name: TreeSum(self.rounds.count) for name in self.parts}

    def start(self) -> None:
        """Start to exchange what was added since the last time. All ranks."""
        for own in self.own.values():
            self.rounds.complete(own)
        rows = zip(*(own.nodes for own in self.own.values()), strict=True)
        nodes = TreeSum(self.rounds.count)
        nodes.extend((row[0][0], self.flat([value for _, value in row])) for row in rows)
        self.own = self.no_terms()
        self.sent = nodes.nodes[0][1] if nodes.nodes else self.flat([None] * len(self.parts))
        assert self.sent is not None
        every = self.rounds.spans(self.rounds.number)
        self.finish = start_reduce_scatter(nodes, self.sent, self.ranks, every)

    def flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The parameters' values in one tensor, which may be the only one's; zeros for None."""
        first = values[0]
        if first is not None and self.sizes == [first.numel(), 0] and first.is_contiguous():
            return first.view(-1)
        like = next(iter(self.parts.values()))
        flat = like.new_empty(sum(self.sizes), dtype=sum_dtype(like.dtype))
        for place, value in zip(flat.split(self.sizes), [*values, None], strict=True):
            if value is None:
                place.zero_()
            else:
                place.view(value.shape).copy_(value)
        return flat

    def end(self) -> None:
        """Wait for the exchange, and add up what this rank got."""
        assert self.finish is not None
        found = self.finish()
        self.kept.skip_to(found.nodes[0][0].start)  # rounds in which the group was not exchanged
        self.kept.extend(found.nodes)
        self.finish = None
        if not self.rounds.is_last:
            self.kept.release()
            self.sent = None

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's sum, once the last exchange has ended. All ranks."""
        shard, whole = self.kept.total(), self.sent
        assert shard is not None
        assert whole is not None
        self.kept, self.sent = TreeSum(self.rounds.count), None
        *places, _ = all_gather(shard, whole, self.ranks.group).split(self.sizes)
        for (name, part), place in zip(self.parts.items(), places, strict=True):
            yield name, place.view(part.shape)

    def totals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's sum where there is one rank; without those that have no term."""
        for name, own in self.own.items():
            self.rounds.complete(own)
            total = own.total()
            if total is not None:
                yield name, total


class ExactGroups:
    """The sums of some parameters of a model, in one pass over a step's microbatches.

    Args:
        parameters: by name; frozen ones too, which have to be frozen on all ranks.
        rounds: of the step.
        ranks: the data-parallel ranks.
        dtypes: to which a parameter's sum is rounded, where it is.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rounds: Rounds,
        ranks: OrderedGroup,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.parameters, self.rounds, self.ranks, self.dtypes = parameters, rounds, ranks, dtypes
        self.groups = [
            GradientGroup({name: parameters[name] for name in names}, rounds, ranks)
            for names in grouped(parameters)
        ]
        self.place = {name: n for n, group in enumerate(self.groups) for name in group.parts}
        self.repeated: set[str] = set()  # parameters that got several gradients in a microbatch
        self.totals: dict[str, torch.Tensor] = {}
        self.used: set[str] = set()  # parameters that a microbatch here has used
        self.earlier: dict[str, torch.Tensor] = {}  # gradients from before the pass
        self.begin(False)

    def set_earlier_aside(self) -> None:
        """Take the gradients from before the pass."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.earlier[name] = local(parameter.grad)
                parameter.grad = None

    def restore(self) -> None:
        """Give parameters without a sum the gradients from before the pass, if they had one."""
        for name, parameter in self.parameters.items():
            if name in self.earlier:
                put(parameter, self.earlier.pop(name))

    @contextmanager
    def taking(self) -> Generator[None, None, None]:
        """Take gradients as a backward brings them."""
        hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(
                lambda _, name=name: self.come(name)
            )
            for name in self.place
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, is_early: bool) -> None:
        """A microbatch begins. With `is_early`, groups are exchanged within its backward."""
        self.is_early = is_early
        self.waiting = [set(group.parts) for group in self.groups]
        self.num_started = self.num_ended = 0

    def come(self, name: str) -> None:
        """A backward has brought a gradient."""
        number = self.place[name]
        if name not in self.waiting[number]:
            self.repeated.add(name)
            return
        self.waiting[number].discard(name)
        self.take(self.groups[number], name)
        while self.is_early and self.num_started < len(self.groups):
            if self.waiting[self.num_started]:
                break
            self.start_next()

    def end(self) -> None:
        """Take the microbatch's gradients that did not come by a hook."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self.place and name in self.waiting[self.place[name]]:
                self.take(self.groups[self.place[name]], name)
                continue
            # A wrapper may give back what it has exchanged, after the gradient was taken from it.
            parameter.grad = None
            if name not in self.place:  # it was frozen when the pass began
                self.used.add(name)

    def take(self, group: GradientGroup, name: str) -> None:
        """Make a parameter's gradient a term of a group's sum."""
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or self.rounds.leaf is None:
            return
        term = _term_of(name, gradient)
        self.used.add(name)
        self.rounds.add(group.own[name], term)

    def exchange(self) -> None:
        """Exchange the groups that this round has not exchanged yet. All ranks."""
        if self.ranks.size == 1:
            for group in self.groups:
                self.totals.update(group.totals())
            return
        while self.num_started < len(self.groups):
            self.start_next()
        while self.num_ended < len(self.groups):
            self.end_next()

    def start_next(self) -> None:
        """Start to exchange the next group. All ranks."""
        if self.num_started - self.num_ended == MAX_STARTED:
            self.end_next()
        self.groups[self.num_started].start()
        self.num_started += 1

    def end_next(self) -> None:
        """End the exchange of the next group; the last round gathers its sums. All ranks."""
        group = self.groups[self.num_ended]
        group.end()
        if self.rounds.is_last:
            self.totals.update(group.gather())
        self.num_ended += 1

    def states(self) -> bytes:
        """Of each parameter: frozen, without a gradient in this rank's microbatches, or with."""
        return bytes(
            FROZEN
            if not parameter.requires_grad
            else GRADIENT
            if name in self.used
            else NO_GRADIENT
            for name, parameter in self.parameters.items()
        )

    def deliver(self, used: set[str]) -> None:
        """Make sums the gradients of what any rank has used, or add them to those from before."""
        for name in used:
            self._give(name, self.totals.pop(name))

    def _give(self, name: str, total: torch.Tensor) -> None:
        parameter = self.parameters[name]
        # Several ranks would get the total from FSDP2 in the dtype of its reduction.
        total = total.to(self.dtypes.get(name, total.dtype))
        earlier = self.earlier.pop(name, None)
        if earlier is None:
            like = local(parameter.detach())
            dtype = parameter.grad_dtype or like.dtype
            # With the strides of the parameter, as autograd would give it.
            fits = total.dtype == dtype and total.stride() == like.stride()
            earlier = total if fits else torch.empty_like(like, dtype=dtype).copy_(total)
        else:
            earlier.add_(total)
        put(parameter, earlier)


def grouped(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """The names of each group of those that are trained, as the backward comes to them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name in reversed(list(parameters)):
        if parameters[name].requires_grad:
            part = local(parameters[name])
            kinds.setdefault((sum_dtype(part.dtype), part.device), []).append(name)
    for (dtype, _), members in kinds.items():
        names: list[str] = []
        size = 0
        for name in members:
            num_bytes = local(parameters[name]).numel() * dtype.itemsize
            if num_bytes >= GROUP_BYTES:  # alone, it is exchanged without a copy
                yield [name]
                continue
            names.append(name)
            size += num_bytes
            if size >= GROUP_BYTES:
                yield names
                names, size = [], 0
        if names:
            yield names


def _term_of(name: str, whole: torch.Tensor) -> torch.Tensor:
    """A gradient as a term of the sum; ValueError for a sparse one, which is not added up."""
    gradient = local(whole.detach())
    if gradient.layout != torch.strided:
        raise ValueError(sparse_gradient(name, gradient.layout))
    return gradient.to(sum_dtype(gradient.dtype))
