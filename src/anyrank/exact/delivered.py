"""Looks at what an optimizer steps: gradients of exact sums, unchanged since then.

`torch.nn.utils.clip_grad_norm_` adds up the squares of FSDP2's gradients by shard, so its factor
depends on the number of ranks, and nothing announces it. What it leaves behind can be seen: every
gradient is multiplied by a number that is no power of two. And parameters outside of the model, of
a loss for instance, have the gradients of a rank's own microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.steps.buckets import local

MAX_SAMPLES = 4  # parameters: a norm scales all
CORNER = 4  # elements of a sample along each dim
WARNING = (
    "exact=True: gradients that FSDP2 shards were changed before the optimizer's step. If by "
    "torch.nn.utils.clip_grad_norm_, the run has other bits on another number of ranks: call "
    "step.clip_grad_norm_(max_norm) instead. What changes each element by itself keeps the bits"
)


class DeliveredGradients:
    """Gradients as the exact sum or `Step` left them: samples of those of sharded parameters.

    Attributes:
        known: parameters of the models that the loader trains, by id.
        samples: by the parameter's id.
        is_noted: whether changes were found, and said.
    """

    def __init__(self) -> None:
        self.known: dict[int, ref[nn.Parameter]] = {}
        self.samples: dict[int, torch.Tensor] = {}
        self.is_noted = False

    def record(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sample the gradients of a model's parameters, in place of those before."""
        for parameter in parameters:
            key = id(parameter)
            if key not in self.known:
                self.known[key] = ref(parameter, lambda _, key=key: self.known.pop(key, None))
        if self.is_noted:
            return
        sharded = (p for p in parameters if isinstance(p, DTensor) and p.grad is not None)
        some = (p for p in sharded if local(p.detach()).numel())
        self.samples = {id(p): _sample_of(p) for p in itertools.islice(some, MAX_SAMPLES)}

    def check_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that has parameters of a model, and others. One without any may step.

        Raises:
            ValueError: names the parameter by its place.
        """
        places = [
            (number, index, parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.grad is not None
        ]
        strangers = [place for place in places if id(place[2]) not in self.known]
        if 0 < len(strangers) < len(places):
            number, index, parameter = strangers[0]
            raise ValueError(
                f"exact=True: parameter {index} of group {number} of the optimizer, of shape "
                f"{list(parameter.shape)}, is not part of the model that microbatches() got, so "
                "its gradient is that of this rank's microbatches alone: give microbatches() one "
                "module that holds both, as nn.ModuleList([model, loss])"
            )

    def are_changed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether gradients of some parameters were changed, not only by powers of two."""
        self.is_noted = self.is_noted or any(map(self._is_changed, parameters))
        return self.is_noted

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        before = self.samples.get(id(parameter))
        if before is None or parameter.grad is None:
            return False
        return not is_scaled_by_two(before, _sample_of(parameter))


def _sample_of(parameter: Any) -> torch.Tensor:
    """A corner of this rank's part of a parameter's gradient. Versions do not tell of changes:
    operations on lists of DTensors leave them as they are.
    """
    part = local(parameter.grad.detach())
    return part[tuple(slice(CORNER) for _ in part.shape)].clone()


def is_scaled_by_two(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether all elements were multiplied by one power of two, as `GradScaler.unscale_` does."""
    if before.shape != now.shape:
        return False
    before, now = (torch.view_as_real(t) if t.is_complex() else t for t in (before, now))
    before, now = before.double(), now.double()
    normal = before.isfinite() & now.isfinite() & (before != 0) & (now != 0)
    factors = (now / before)[normal].unique()
    return not len(factors) or (len(factors) == 1 and float(factors[0].frexp()[0]) == 0.5)
