"""The ordered sums of parameters that FSDP2 does not reduce, from their `.grad`.

Each gradient is taken from its parameter as it comes, and added to this rank's sum. After the last
microbatch the sums are exchanged bucket by bucket, in the same order on every rank. The totals are
written over the memory of the sums that were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from anyrank.tensors.torch_classes import is_dtensor
from anyrank.training.exact.checks import sparse_gradient
from anyrank.training.exact.ordered_reduce import OrderedGroup, all_gather, start_reduce_scatter
from anyrank.training.exact.rounds import Rounds
from anyrank.training.exact.tree_sum import TreeSum
from anyrank.training.gradients.buckets import BUCKET_BYTES, MAX_STARTED, buckets, local
from anyrank.training.gradients.norm import sum_dtype
from anyrank.training.steps.step_record import FROZEN, GRADIENT, NO_GRADIENT


class Bucket:
    """Sums of parameters whose gradients are exchanged together, as one tensor.

    Args:
        parameters: parameters of one dtype and device, by name.
        rounds: the rounds of the step.
        ranks: the data-parallel ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], rounds: Rounds, ranks: OrderedGroup
    ) -> None:
        self.rounds, self.ranks = rounds, ranks
        self.parts = {name: local(param.detach()) for name, param in parameters.items()}
        sizes = [part.numel() for part in self.parts.values()]
        self.sizes = [*sizes, -sum(sizes) % ranks.size]  # a shard for each rank
        self.sums = {name: TreeSum(rounds.count) for name in self.parts}  # this rank's terms

    def start(self) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        """Start to exchange the sums. Collective.

        Returns:
            A function that waits for the exchange and gives each parameter's total. Collective.
        """
        for sum_ in self.sums.values():
            self.rounds.complete(sum_)
        rows = zip(*(sum_.nodes for sum_ in self.sums.values()), strict=True)
        nodes = TreeSum(self.rounds.count)
        nodes.extend((row[0][0], self._flat([value for _, value in row])) for row in rows)
        self.sums = {}
        sent = nodes.nodes[0][1] if nodes.nodes else self._flat([None] * len(self.parts))
        assert sent is not None
        wait = start_reduce_scatter(nodes, sent, self.ranks, self.rounds.whole_spans)

        def finish() -> Iterator[tuple[str, torch.Tensor]]:
            shard = wait().total()
            assert shard is not None
            *places, _ = all_gather(shard, sent, self.ranks.group).split(self.sizes)
            for (name, part), piece in zip(self.parts.items(), places, strict=True):
                yield name, piece.view(part.shape)

        return finish

    def _flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the parameters' values in one tensor, or the only one itself; zeros for None."""
        first = values[0]
        if first is not None and self.sizes == [first.numel(), 0] and first.is_contiguous():
            return first.view(-1)
        like = next(iter(self.parts.values()))
        flat = like.new_empty(sum(self.sizes), dtype=sum_dtype(like.dtype))
        for piece, value in zip(flat.split(self.sizes), [*values, None], strict=True):
            if value is None:
                piece.zero_()
            else:
                piece.view(value.shape).copy_(value)
        return flat

    def totals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's sum, on one rank; parameters without a term are left out."""
        sums, self.sums = self.sums, {}
        for name, sum_ in sums.items():
            self.rounds.complete(sum_)
            total = sum_.total()
            if total is not None:
                yield name, total


class GradientSums:
    """The sums of some parameters of a model, in one pass over a step's microbatches.

    Args:
        parameters: by name; frozen ones too, which must be frozen on every rank.
        rounds: the rounds of the step.
        ranks: the data-parallel ranks.
        dtypes: the dtype to which a parameter's sum is rounded, if it is.

    Attributes:
        used: parameters that a microbatch of this rank has used.
        repeated: parameters that got several gradients in a microbatch.
        late: parameters that were frozen when the pass started, and got gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rounds: Rounds,
        ranks: OrderedGroup,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.parameters, self.rounds, self.ranks, self.dtypes = parameters, rounds, ranks, dtypes
        names = buckets(parameters, lambda parameter: sum_dtype(parameter.dtype), BUCKET_BYTES)
        self.buckets = [Bucket({n: parameters[n] for n in some}, rounds, ranks) for some in names]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parts}
        self.used: set[str] = set()
        self.repeated: set[str] = set()
        self.late: set[str] = set()
        self._earlier: dict[str, torch.Tensor] = {}  # gradients from before the pass
        self._received: set[str] = set()  # in the current microbatch

    def set_earlier_aside(self) -> None:
        """Remove and keep the gradients from before the pass."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._earlier[name] = local(parameter.grad)
                parameter.grad = None

    def restore(self) -> None:
        """Restore the gradients from before the pass for parameters without a sum."""
        for name, parameter in self.parameters.items():
            if name in self._earlier:
                _put(parameter, self._earlier.pop(name))

    @contextmanager
    def taking(self) -> Generator[None, None, None]:
        """Take gradients as backward produces them."""
        hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(
                lambda _, name=name: self._on_gradient(name)
            )
            for name in self.bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_microbatch(self) -> None:
        """Start a microbatch."""
        self._received.clear()

    def _on_gradient(self, name: str) -> None:
        if name in self._received:
            self.repeated.add(name)
            return
        self._add_gradient(name)

    def end_microbatch(self) -> None:
        """Take the microbatch's gradients that did not arrive in a hook."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name not in self.bucket_of:
                self.late.add(name)
            elif name not in self._received:
                self._add_gradient(name)
            # A wrapper may restore a gradient that it exchanged after this sum took it.
            parameter.grad = None

    def _add_gradient(self, name: str) -> None:
        """Make a parameter's gradient a term of its sum."""
        self._received.add(name)
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and self.rounds.leaf is not None:
            self.used.add(name)
            self.rounds.add(self.bucket_of[name].sums[name], _term_of(name, gradient))

    def states(self) -> bytes:
        """Return each parameter's state: frozen, without a gradient in its microbatches, or with
        one.
        """
        return bytes(
            FROZEN
            if not parameter.requires_grad
            else GRADIENT
            if name in self.used
            else NO_GRADIENT
            for name, parameter in self.parameters.items()
        )

    def exchange(self, used: Iterable[str]) -> None:
        """Set the totals of parameters that any rank has `used`, or add them to former gradients.

        Collective.
        """
        wanted = set(used)
        for name, total in self._totals():
            if name in wanted:
                self._set_gradient(name, total)
        self.restore()

    def _totals(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.ranks.size == 1:
            for bucket in self.buckets:
                yield from bucket.totals()
            return
        started: deque[Callable[[], Iterator[tuple[str, torch.Tensor]]]] = deque()
        for bucket in self.buckets:
            if len(started) == MAX_STARTED:
                yield from started.popleft()()
            started.append(bucket.start())
        while started:
            yield from started.popleft()()

    def _set_gradient(self, name: str, total: torch.Tensor) -> None:
        parameter = self.parameters[name]
        # On several ranks FSDP2 would return the total in the dtype of its reduction.
        total = total.to(self.dtypes.get(name, total.dtype))
        earlier = self._earlier.pop(name, None)
        if earlier is None:
            like = local(parameter.detach())
            dtype = parameter.grad_dtype or like.dtype
            # With the strides of the parameter, as autograd does it.
            fits = total.dtype == dtype and total.stride() == like.stride()
            earlier = total if fits else torch.empty_like(like, dtype=dtype).copy_(total)
        else:
            earlier.add_(total)
        _put(parameter, earlier)


def _put(parameter: Any, part: torch.Tensor) -> None:
    """Make a tensor this rank's part of the parameter's gradient."""
    if is_dtensor(parameter):
        parameter.grad = type(parameter).from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = part


def _term_of(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a term of the sum; ValueError for a sparse one, which cannot be."""
    gradient = local(whole.detach())
    if gradient.layout != torch.strided:
        raise ValueError(sparse_gradient(name, gradient.layout))
    return gradient.to(sum_dtype(gradient.dtype))
