"""The ways to tile an MLP and a loss that benchmarks/memory.py compares, each as one call.

Packages are compared where they are installed:

    pip install --no-deps deepspeed hjson py-cpuinfo ninja msgpack einops liger-kernel triton
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anyrank

BF16 = torch.bfloat16
Tiled = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """As the large language models have it."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += x.numel() // x.shape[-1]  # some pass them without a batch dim
        return self.down(F.silu(self.gate(x)) * self.up(x))


def deepspeed_tiles(module: nn.Module, chunk: int) -> Tiled:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    weights = list(module.parameters())
    return lambda x: TiledMLP.apply(call, module, x, x.shape[1] // chunk, weights)


def liger_tiles(module: nn.Module, chunk: int) -> Tiled:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    return lambda x: apply_tiled_mlp(call, module, x, x.shape[1] // chunk)


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def torch_tiles(module: nn.Module, chunk: int) -> Tiled:
    region = functools.partial(checkpoint, module, use_reentrant=False)
    return lambda x: torch.cat([region(part) for part in x.split(chunk, 1)], 1)


MLPS: dict[str, Callable[[Any, int], Tiled]] = {
    "plain": lambda module, chunk: module,
    "torch checkpoint per tile": torch_tiles,
    "anyrank.tile": lambda module, chunk: anyrank.tile(module, chunk_size=chunk),
    "anyrank.tile, grad_dtype": lambda module, chunk: anyrank.tile(
        module, chunk_size=chunk, grad_dtype=torch.float32
    ),
}
PACKAGES = [name for name in ("deepspeed", "liger_kernel") if importlib.util.find_spec(name)]
if "deepspeed" in PACKAGES:
    MLPS["DeepSpeed TiledMLP"] = deepspeed_tiles
if "liger_kernel" in PACKAGES:
    MLPS["Liger tiled_mlp"] = liger_tiles


def full_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden), labels)


def chunked_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(h), y, reduction="sum")

    parts = zip(hidden.split(1024), labels.split(1024), strict=True)
    return sum(checkpoint(part, h, y, use_reentrant=False) for h, y in parts) / len(labels)


def torch_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, head.weight, labels, options=options)


LOSSES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all logits": full_loss,
    "torch checkpoint per tile": chunked_loss,
    "anyrank.tiled_loss": anyrank.tiled_loss,
    "anyrank.tiled_loss, recompute": functools.partial(anyrank.tiled_loss, impl="recompute"),
}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["torch linear_cross_entropy"] = torch_loss
