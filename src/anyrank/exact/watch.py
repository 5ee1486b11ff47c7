"""Finds what the loop over microbatches changes in a model: each rank would have its own changes.

A forward pass may update buffers (running statistics, counters) and parameters
(`Embedding(max_norm=...)`), and an optimizer may step in a gradient hook: refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.exact.checks import updates_statistics
from anyrank.tensors.sharded_tensor import version_of

SAMPLED = 1 << 14  # elements of a buffer; larger ones are compared whole in a model's first step


class ChangeWatch:
    """The parameters and buffers of a model when a pass over the microbatches begins.

    Args:
        modules: of the model, by name.
        parameters: the same.
        is_first: it is the model's first pass: whole buffers, and writes through `.data`. In others
            buffers are sampled, as an update may leave them as they were (DDP's broadcast).
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        is_first: bool,
    ) -> None:
        self.modules, self.is_first = modules, is_first
        # FSDP2's forward works on copies, and its hooks are refused.
        self.versions = {
            name: (parameter, version_of(parameter))
            for name, parameter in parameters.items()
            if not isinstance(parameter, DTensor)
        }
        self.before = {
            name: (buffer, version_of(buffer), self.sample(buffer).clone())
            for name, buffer in self.buffers()
        }

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the modules, by name."""
        for prefix, module in self.modules.items():
            yield from module.named_buffers(prefix, recurse=False)

    def sample(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer, or in later passes elements all over a large one."""
        if self.is_first or buffer.numel() <= SAMPLED:
            return buffer
        return buffer.reshape(-1)[:: 1 + buffer.numel() // SAMPLED]

    def changed(self) -> list[str]:
        """Names of what was changed, and forget the samples."""
        before, self.before = self.before, {}
        parameters = [n for n, (tensor, old) in self.versions.items() if version_of(tensor) != old]
        buffers = [
            name
            for name, buffer in self.buffers()
            if name in before and self.is_changed(buffer, *before[name])
        ]
        modules = self.modules.items()
        statistics = [f"{name}.running_mean" for name, m in modules if updates_statistics(m)]
        return parameters + buffers + statistics

    def is_changed(
        self, buffer: torch.Tensor, same: torch.Tensor, version: int, copy: torch.Tensor
    ) -> bool:
        """Whether a buffer has other values than its sample."""
        if buffer is same and version_of(buffer) == version and not self.is_first:
            return False
        return buffer.shape == same.shape and not _same_bits(copy, self.sample(buffer))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; nan is equal to nan. True for other shapes."""
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return not is_alike or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
