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

SAMPLED = 1 << 14  # elements that are compared of a larger buffer


class ChangeWatch:
    """The parameters of a model, and samples of its buffers, when a pass begins.

    Args:
        modules: of the model, by name.
        parameters: the same.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.modules = modules
        # FSDP2's forward works on copies.
        self.versions = {
            name: (parameter, version_of(parameter))
            for name, parameter in parameters.items()
            if not isinstance(parameter, DTensor)
        }
        # By value: DDP's broadcast writes what is there.
        self.before = {name: sample.clone() for name, sample in self._samples()}

    def _samples(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer of the modules, or elements all over a large one."""
        for prefix, module in self.modules.items():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield name, buffer.reshape(-1)[:: 1 + buffer.numel() // SAMPLED]

    def changed(self) -> list[str]:
        """Names of what was changed, and forget the samples."""
        before, self.before = self.before, {}
        parameters = [n for n, (tensor, old) in self.versions.items() if version_of(tensor) != old]
        buffers = [n for n, now in self._samples() if n in before and _differ(before[n], now)]
        modules = self.modules.items()
        statistics = [f"{name}.running_mean" for name, m in modules if updates_statistics(m)]
        return parameters + buffers + statistics


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two samples have other values; nan is equal to nan. Those of other shapes do not."""
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and not torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all()
