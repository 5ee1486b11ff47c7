"""Finds what the loop over microbatches changes in a model: each rank would have its own changes.

A forward pass may update buffers (running statistics, counters) and parameters
(`Embedding(max_norm=...)`), and an optimizer may step in a gradient hook: refused. It may set plain
attributes of its modules, too, which may be state (a counter) or not (the last loss): noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from anyrank.exact.checks import updates_statistics
from anyrank.tensors.sharded_tensor import version_of

COPIED_BYTES = 64 << 20  # of buffers in each step; larger ones in a model's first step alone
LOOKS = 2  # passes of a model whose attributes are compared: some are set in the first one
OWN = vars(nn.Module()).keys()  # attributes that every module has

Attributes = Mapping[str, tuple[int | float | torch.Tensor, int]]  # with the versions of tensors


class ChangeWatch:
    """The parameters and buffers of a model when a pass over the microbatches begins.

    Args:
        model: its buffers are copied, as an update may leave them as they were (DDP's broadcast).
        is_first: it is the model's first pass: large buffers too, and writes through `.data`.
    """

    def __init__(self, model: nn.Module, is_first: bool) -> None:
        self.model, self.is_first = model, is_first
        # FSDP2's forward works on copies, and its hooks are refused.
        self.versions = {
            name: (parameter, version_of(parameter))
            for name, parameter in model.named_parameters()
            if not isinstance(parameter, DTensor)
        }
        buffers = dict(model.named_buffers())
        is_small = sum(buffer.nbytes for buffer in buffers.values()) <= COPIED_BYTES
        self.buffers = {
            name: (buffer, version_of(buffer), buffer.clone())
            for name, buffer in buffers.items()
            if is_first or is_small
        }

    def changed(self) -> list[str]:
        """Names of what was changed, and forget the copies."""
        before, self.buffers = self.buffers, {}
        parameters = [n for n, (tensor, old) in self.versions.items() if version_of(tensor) != old]
        buffers = [
            name
            for name, buffer in self.model.named_buffers()
            if name in before and self.is_changed(buffer, *before[name])
        ]
        modules = self.model.named_modules()
        statistics = [f"{name}.running_mean" for name, m in modules if updates_statistics(m)]
        return parameters + buffers + statistics

    def is_changed(
        self, buffer: torch.Tensor, same: torch.Tensor, version: int, copy: torch.Tensor
    ) -> bool:
        """Whether a buffer has other values than its copy."""
        if buffer is same and version_of(buffer) == version and not self.is_first:
            return False
        return not same_bits(copy, buffer)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; nan is equal to nan. True for other shapes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def attributes_of(model: nn.Module) -> Attributes:
    """Numbers and plain tensors among the attributes of a model's modules, by name.

    Without tensors of a graph: an auxiliary loss for the step, not state for the next microbatch.
    """
    return {
        f"{prefix}.{name}".lstrip("."): (value, version_of(value) if is_tensor else 0)
        for prefix, module in model.named_modules()
        if not isinstance(module, DistributedDataParallel)
        for name, value in vars(module).items()
        for is_tensor in (type(value) is torch.Tensor and not value.requires_grad,)
        if (is_tensor or type(value) in (bool, int, float)) and name not in OWN
    }


def changed_attributes(before: Attributes, model: nn.Module) -> list[str]:
    """Names of the attributes that have other values than before; a table may grow."""
    now = attributes_of(model) if before else {}
    return [name for name in before if name in now and not is_same(before[name], now[name])]


def is_same(one: tuple[object, int], other: tuple[object, int]) -> bool:
    """Whether two attributes, with their versions, have the same value."""
    (before, old), (now, new) = one, other
    if before is now:
        return old == new
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return before.device == now.device and same_bits(before, now)
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return False
    return before == now or (before != before and now != now)  # nan is equal to nan


def note_of(attributes: Iterable[str]) -> str:
    """What changed attributes may mean, and the way out."""
    return (
        f"exact=True: forward passes set attributes of the model, {sorted(set(attributes))[:8]}, "
        "and each rank has the values of its own microbatches: if a later forward reads them (a "
        "counter, a running mean), the run has other bits on another number of ranks, so change "
        "them after the loop over microbatches(), from step.number for instance"
    )
