"""Small models and the ways to lay them over ranks, shared by the rank tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    """An MLP with a norm, a 0-d buffer, and buffers inside and outside of the state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("count", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(2.0))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.table


class Net(nn.Module):
    """Two blocks between a tied embedding and its head; `scale` has fewer rows than some worlds."""

    def __init__(self, width: int = 8, hidden: int = 12, vocab: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(2)])
        self.scale = nn.Parameter(torch.randn(1, width))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def reference(**sizes: int) -> Net:
    """The model with values, equal on every rank."""
    torch.manual_seed(0)
    net = Net(**sizes)
    with torch.no_grad():
        for block in net.blocks:
            block.norm.weight.normal_()
            block.count.normal_()
            block.steps.fill_(5)
    return net


def plain(net: nn.Module) -> nn.Module:
    return net


def fsdp(net: nn.Module) -> nn.Module:
    for n, block in enumerate(net.blocks):
        fully_shard(block, reshard_after_forward=n == 0)
    return fully_shard(net)


def fsdp_offload(net: nn.Module) -> nn.Module:
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in net.blocks:
        fully_shard(block, offload_policy=policy)
    return fully_shard(net, offload_policy=policy)


def fsdp_mixed(net: nn.Module) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return fully_shard(net)


def fsdp_ignored(net: nn.Module) -> nn.Module:
    ignored = {net.blocks[0].up.weight, net.scale}
    fully_shard(net.blocks[0], ignored_params=ignored)
    return fully_shard(net, ignored_params=ignored)


def hsdp(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh(
        "cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("rep", "shard")
    )
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _tp_plan(net: nn.Module, mesh: Any) -> None:
    for block in net.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan, src_data_rank=None)


def tp(net: nn.Module) -> nn.Module:
    _tp_plan(net, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return net


def fsdp_tp(net: nn.Module) -> nn.Module:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    _tp_plan(net, mesh["tp"])
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


LAYOUTS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": plain,
    "fsdp": fsdp,
    "fsdp_offload": fsdp_offload,
    "fsdp_mixed": fsdp_mixed,
    "fsdp_ignored": fsdp_ignored,
    "hsdp": hsdp,
    "tp": tp,
    "fsdp_tp": fsdp_tp,
}


def locals_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds, by name: parameters and all buffers."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        local: Any = tensor.detach()
        found[name] = local.to_local() if hasattr(local, "placements") else local
    return found


def assert_same(net: nn.Module, expected: nn.Module) -> None:
    """Every local tensor equal, bit by bit."""
    mine, wanted = locals_of(net), locals_of(expected)
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].shape == tensor.shape, (name, mine[name].shape, tensor.shape)
        assert torch.equal(mine[name], tensor), name
