"""A model whose ranks hold plain parts of it, as Megatron and vLLM do; shared by the rank tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

WIDTH, HIDDEN, VOCAB = 4, 7, 10


def chunk(rank: int, size: int, length: int) -> tuple[int, int]:
    """Start and length of torch's chunk of a dim."""
    each = -(-length // size)
    start = min(rank * each, length)
    return start, min(each, length - start)


class Parts(nn.Module):
    """Column-, row- and vocabulary-parallel parts, a fused gate_up, and a norm that is whole."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        own, vocab = chunk(rank, size, HIDDEN)[1], chunk(rank, size, VOCAB)[1]
        self.embed = nn.Parameter(torch.zeros(vocab, WIDTH))
        self.gate_up = nn.Parameter(torch.zeros(2 * own, WIDTH))
        self.bias = nn.Parameter(torch.zeros(own))
        self.down = nn.Parameter(torch.zeros(WIDTH, own))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("count", torch.arange(3.0))
        self.head = self.embed


def intervals(size: int) -> list[list[tuple[int, int]]]:
    """What each rank holds of gate_up: its chunk of the gate above its chunk of the up."""
    chunks = [chunk(rank, size, HIDDEN) for rank in range(size)]
    return [[(start, n), (HIDDEN + start, n)] for start, n in chunks]


def layouts(mesh: Any, size: int) -> dict[str, Any]:
    """As torch cuts, unequal parts too; gate_up has two pieces on each rank."""
    return {
        "embed": (mesh, [Shard(0)]),
        "gate_up": (mesh, [Shard(0)], intervals(size)),
        "bias": (mesh, [Shard(0)]),
        "d*n": (mesh, [Shard(1)]),
    }


def part_of(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a whole tensor of the model, in its usual memory."""
    if name in ("embed", "head"):
        start, n = chunk(rank, size, VOCAB)
        return whole[start : start + n].clone()
    start, n = chunk(rank, size, HIDDEN)
    rows = slice(start, start + n)
    if name == "gate_up":
        return torch.cat([whole[:HIDDEN][rows], whole[HIDDEN:][rows]])
    if name == "bias":
        return whole[rows].clone()
    return whole[:, rows].clone() if name == "down" else whole.clone()


def values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same values of a whole tensor on any rank."""
    made = torch.Generator().manual_seed(seed + sum(name.encode()))
    return torch.randn(shape, generator=made)


def fill(model: nn.Module, seed: int, rank: int = 0, size: int = 1) -> None:
    """Give a model the values of this seed."""
    whole = dict(Parts().named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(name, values(name, whole[name].shape, seed), rank, size))
