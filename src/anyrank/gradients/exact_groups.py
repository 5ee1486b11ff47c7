"""The ordered sums of parameters that FSDP2 does not reduce, from their `.grad`.

Terms are kept by parameter. They are exchanged by groups of parameters, in an order that is the
same on all ranks: after a backward, or within it as soon as a group's gradients are there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from anyrank.gradients.exact_checks import sparse_gradient
from anyrank.gradients.exact_rounds import Rounds
from anyrank.gradients.gradient_sync import FROZEN, GRADIENT, NO_GRADIENT, local, put
from anyrank.gradients.ordered_reduce import OrderedGroup, all_gather, as_term, start_reduce_scatter
from anyrank.gradients.tree_sum import Span, TreeSum, sum_dtype

GROUP_BYTES = 4 << 20  # of gradients exchanged together
MAX_STARTED = 4  # groups in flight within a backward, each in several copies


class GradientGroup:
    """Parameters whose gradients are exchanged together, as one tensor.

    Args:
        parameters: of one dtype and device, by name.
        ranks: the data-parallel ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: OrderedGroup) -> None:
        self.names, self.ranks = list(parameters), ranks
        self.parts = [local(parameter.detach()) for parameter in parameters.values()]
        sizes = [part.numel() for part in self.parts]
        self.sizes = [*sizes, -sum(sizes) % ranks.size]  # a shard for each rank
        self.dtype = sum_dtype(self.parts[0].dtype)
        self.reset()

    def reset(self) -> None:
        """Forget what was exchanged."""
        self.kept = TreeSum(self.ranks.count)  # this rank's shard
        self.started: Callable[[], TreeSum] | None = None
        self.whole: torch.Tensor | None = None

    def start(
        self,
        nodes: Sequence[tuple[Span, Sequence[torch.Tensor | None]]],
        every: Sequence[Sequence[Span]],
    ) -> None:
        """Start to exchange the nodes of all ranks. All ranks.

        Args:
            nodes: of this rank, each with a value for each parameter; they are copied.
            every: the nodes of each rank.
        """
        own = TreeSum(self.ranks.count)
        own.extend((span, self.flat(values)) for span, values in nodes)
        like = own.nodes[0][1] if own.nodes else self.flat([None] * len(self.parts))
        assert like is not None
        self.started = start_reduce_scatter(own, like, self.ranks, every)

    def flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The parameters' values in one tensor; zeros for None."""
        flat = self.parts[0].new_empty(sum(self.sizes), dtype=self.dtype)
        for place, value in zip(flat.split(self.sizes), [*values, None], strict=True):
            if value is None:
                place.zero_()
            else:
                place.view(value.shape).copy_(value)
        return flat

    def keep(self) -> None:
        """Wait for the exchange, and add up what this rank got."""
        assert self.started is not None
        self.kept.extend(self.started().nodes)
        self.started = None

    def gather(self) -> None:
        """Wait for the last exchange, and gather all shards of the whole sum. All ranks."""
        self.keep()
        total = self.kept.total()
        assert total is not None
        self.whole = all_gather(total, self.ranks.group, self.ranks.size)
        self.kept = TreeSum(self.ranks.count)

    def totals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's sum, once it is gathered."""
        assert self.whole is not None
        *places, _ = self.whole.split(self.sizes)
        self.whole = None
        for name, part, place in zip(self.names, self.parts, places, strict=True):
            yield name, place.view(part.shape)


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
        self.sums = {name: TreeSum(rounds.count) for name in parameters}  # until an exchange
        self.groups = [
            GradientGroup({name: parameters[name] for name in names}, ranks)
            for names in grouped(parameters)
        ]
        self.grouped = {name for group in self.groups for name in group.names}
        self.used: set[str] = set()  # parameters that a microbatch here has used
        self.squares = 0.0  # the sum of the squares of all terms, where they are counted
        self.is_repeated = False  # a gradient came after its group was started
        self.earlier: dict[str, torch.Tensor] = {}  # gradients from before the pass

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

    def add_terms(self, counts_squares: bool) -> None:
        """Make the gradients of the microbatch terms of the sums."""
        leaf = self.rounds.leaf
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if leaf is None:
                continue
            term = _term_of(name, gradient)
            if term is not None:
                self.used.add(name)
                if counts_squares:
                    self.squares += float(term.abs().double().square().sum())
            self.sums[name].add(Span(leaf, leaf + 1), term)

    def exchange(self) -> None:
        """Exchange what was added since the last time, and keep this rank's shards. All ranks."""
        for group in self.groups:
            self.start(group)
            group.keep()
            group.kept.release()

    def start(self, group: GradientGroup) -> None:
        """Start to exchange a group's sums. All ranks."""
        nodes = self.nodes_of(group)
        for name in group.names:
            self.sums[name] = TreeSum(self.rounds.count)
        group.start(nodes, self.rounds.spans(self.rounds.number))

    def nodes_of(self, group: GradientGroup) -> list[tuple[Span, list[torch.Tensor | None]]]:
        """The nodes of this rank's sums, each with a value for each parameter of the group."""
        sums = [self.sums[name].nodes for name in group.names]
        return [(row[0][0], [value for _, value in row]) for row in zip(*sums, strict=True)]

    def start_early(self, group: GradientGroup) -> None:
        """Start to exchange a group's sums and last gradients, which are all kept. All ranks."""
        nodes = self.nodes_of(group)
        leaf = self.rounds.leaf
        if leaf is not None:
            terms = [_term_of(name, self.parameters[name].grad) for name in group.names]
            nodes.append((Span(leaf, leaf + 1), terms))
        group.start(nodes, self.rounds.spans(self.rounds.number))

    @contextmanager
    def starting_early(self) -> Generator[None, None, None]:
        """Start the exchange of each group once the backward has all of its gradients, in order."""
        waiting = [set(group.names) for group in self.groups]
        place = {name: number for number, names in enumerate(waiting) for name in names}
        num_started = 0

        def start_next() -> None:
            nonlocal num_started
            self.start_early(self.groups[num_started])
            num_started += 1
            if num_started > MAX_STARTED:
                self.groups[num_started - 1 - MAX_STARTED].gather()

        def ready(name: str) -> None:
            if place[name] < num_started:
                self.is_repeated = True
                return
            waiting[place[name]].discard(name)
            while num_started < len(waiting) and not waiting[num_started]:
                start_next()

        hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(
                lambda _, name=name: ready(name)
            )
            for name in place
            if self.parameters[name].requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while num_started < len(self.groups):
            start_next()
        for group in self.groups[-MAX_STARTED:]:
            group.gather()
        if self.rounds.leaf is not None:
            grads = ((name, parameter.grad) for name, parameter in self.parameters.items())
            self.used |= {name for name, grad in grads if grad is not None}

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

    def deliver(self, used: set[str], is_repeated: bool) -> None:
        """Make the sums the gradients of the parameters that any rank has used. All ranks.

        Args:
            used: their names.
            is_repeated: a rank got gradients of a group after its exchange had begun.
        """
        if self.ranks.size == 1:
            for name in used:
                self.give(name, self.sums.pop(name).total())
            return
        if is_repeated:
            for group in self.groups:
                group.reset()
            self.add_terms(False)
        for parameter in self.parameters.values():
            parameter.grad = None
        for group in self.groups:
            if group.whole is None:
                self.start(group)
                group.gather()
            for name, total in group.totals():
                self.sums[name] = TreeSum(self.rounds.count)
                if name in used:
                    self.give(name, total)

    def give(self, name: str, total: torch.Tensor | None) -> None:
        """Make a sum the parameter's gradient, or add it to the one from before the pass."""
        assert total is not None
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
            names.append(name)
            size += local(parameters[name]).numel() * dtype.itemsize
            if size >= GROUP_BYTES:
                yield names
                names, size = [], 0
        if names:
            yield names


def _term_of(name: str, whole: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient as a term of the sum; ValueError for a sparse one, which is not added up."""
    if whole is None:
        return None
    gradient = local(whole)
    if gradient.layout != torch.strided:
        raise ValueError(sparse_gradient(name, gradient.layout))
    return as_term(gradient)
