"""Looks at what an optimizer steps: a gradient of an exact sum, unchanged since then.

`torch.nn.utils.clip_grad_norm_` adds up the squares of FSDP2's gradients by shard, so its factor
depends on the number of ranks, and nothing announces it. What it leaves behind can be seen: every
gradient is multiplied by a number that is no power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.steps.buckets import local

CORNER = 4  # elements of the sample along each dim
WARNING = (
    "exact=True: gradients that FSDP2 shards were changed before the optimizer's step. If by "
    "torch.nn.utils.clip_grad_norm_, the run has other bits on another number of ranks: call "
    "step.clip_grad_norm_(max_norm) instead. What changes each element by itself keeps the bits"
)


class DeliveredGradients:
    """One sharded gradient of each model as the exact sum or `Step` left it.

    Attributes:
        samples: by the parameter's id.
    """

    def __init__(self) -> None:
        self.samples: dict[int, torch.Tensor] = {}

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sample a gradient of a model's parameters, in place of those before."""
        sharded = (p for p in parameters if isinstance(p, DTensor) and p.grad is not None)
        one = next((p for p in sharded if local(p.detach()).numel()), None)
        self.samples = {} if one is None else {id(one): _sample_of(one)}

    def are_changed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the sampled one among some parameters was changed, not only by a power of two."""
        return any(
            not is_scaled_by_two(self.samples[id(p)], _sample_of(p))
            for p in parameters
            if id(p) in self.samples and p.grad is not None
        )


def _sample_of(parameter: Any) -> torch.Tensor:
    """A corner of this rank's part of a parameter's gradient. Versions do not tell of changes:
    operations on lists of DTensors leave them as they are.
    """
    part = local(parameter.grad.detach())
    return part[tuple(slice(CORNER) for _ in part.shape)].clone()


def is_scaled_by_two(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether all elements were multiplied by one power of two, as `GradScaler.unscale_` does."""
    before, now = (torch.view_as_real(t) if t.is_complex() else t for t in (before, now))
    before, now = before.double(), now.double()
    normal = before.isfinite() & now.isfinite() & (before != 0) & (now != 0)
    factors = (now / before)[normal].unique()
    return not len(factors) or (len(factors) == 1 and float(factors[0].frexp()[0]) == 0.5)
