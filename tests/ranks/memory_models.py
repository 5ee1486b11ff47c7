"""Small models with everything that tiling and recomputing has to get right, and their wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.offloads import offload_of_cpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import anyrank

WIDTH, HIDDEN, CHUNK = 4, 6, 4


@dataclass(frozen=True)
class Feature:
    """What a model has, and how it is used."""

    tied: bool = False
    twice: bool = False  # every layer is called twice
    experts: str = ""  # which rows the second expert gets: "some", "first tile", "none on rank 0"
    adapters: bool = False
    frozen_input: bool = False
    dropout: float = 0.0
    autocast: bool = False
    extra: bool = False  # a second result with a gradient of its own
    keyword: bool = False
    transposed: bool = False  # three rows in a batch, not contiguous
    rows: int | None = None
    filled: bool = False  # p.grad is there before backward
    error: bool = False  # the first step ends in the middle of a tile
    nested: bool = False
    offload: bool = False
    tiled_loss: bool = False
    wide: bool = False  # grad_dtype
    counts: bool = False  # its MLPs count their calls
    compiled: bool = False
    outer_grad: bool = False  # torch.autograd.grad in place of backward


FEATURES: dict[str, Feature] = {
    "nothing": Feature(),
    "tied": Feature(tied=True),
    "called twice": Feature(twice=True),
    "expert unused in the last tile": Feature(experts="first tile"),
    "expert unused in some tiles": Feature(experts="some"),
    "expert unused on a rank": Feature(experts="none on rank 0"),
    "adapters": Feature(adapters=True),
    "frozen input": Feature(frozen_input=True),
    "dropout": Feature(dropout=0.5),
    "autocast": Feature(autocast=True),
    "extra output": Feature(extra=True),
    "keyword": Feature(keyword=True),
    "transposed": Feature(transposed=True),
    "divisible": Feature(rows=8),
    "less than a tile": Feature(rows=3),
    "empty": Feature(rows=0),
    "grad filled": Feature(filled=True),
    "outer grad": Feature(outer_grad=True),
    "error, then a good step": Feature(error=True),
    "nested": Feature(nested=True),
    "nested, dropout, twice": Feature(nested=True, dropout=0.5, twice=True),
    "nested, offload, tiled loss": Feature(nested=True, offload=True, tiled_loss=True, tied=True),
    "wide sums": Feature(wide=True, experts="first tile", twice=True),
    "wide sums, tied and frozen": Feature(wide=True, tied=True, frozen_input=True),
    "compiled": Feature(compiled=True),
    "compiled, a graph per tile": Feature(compiled=True, counts=True, rows=6),
    "compiled, nested, offload": Feature(compiled=True, nested=True, offload=True, rows=10),
}


class Mlp(nn.Module):
    """An MLP, maybe with adapters or a second expert for the rows that `route` chooses."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        if feature.experts:
            self.expert = nn.Linear(WIDTH, WIDTH)
        if feature.adapters:
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.fail_at = -1
        self.calls = 0

    def forward(self, x: torch.Tensor, *, route: Any = None, scale: Any = None) -> Any:
        # Counting is a side effect, which keeps a compiler from tracing the tiles.
        self.calls += self.feature.error or self.feature.counts
        if self.calls == self.fail_at:
            raise KeyError("in the middle")
        hidden = F.dropout(torch.tanh(self.up(x)), self.feature.dropout)
        y = self.down(hidden)
        if scale is not None:
            y = y * scale
        if self.feature.adapters:
            y = y + self.b(self.a(x))
        if route is not None and route.any():
            y = y.index_put((route,), self.expert(x[route]))
        return (y, hidden.sin()) if self.feature.extra else y


class Layer(nn.Module):
    """Norm and MLP, with a sum around."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp(feature)
        self.loop = False  # run the MLP in a plain loop over the tiles, for the same dropout

    def forward(self, x: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(x)
        if self.loop:
            parts = hidden.split(CHUNK, 1) if hidden.shape[1] else [hidden]
            y = torch.cat([self.mlp(part) for part in parts], 1)
        else:
            y = self.mlp(hidden, **named)
        y, extra = y if self.feature.extra else (y, y.new_zeros(()))
        return x + y, extra.sum()


class Net(nn.Module):
    """Two layers between an embedding and a head; returns its loss."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Layer(feature) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if feature.tied:
            self.head.weight = self.embed.weight
        if feature.frozen_input:
            for module in (self.embed, self.layers[0].norm):
                module.requires_grad_(False)
        self.ours = False

    def forward(self, x: torch.Tensor, named: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = x.new_zeros(())
        x = self.embed(x)
        for _ in range(2 if self.feature.twice else 1):
            for layer in self.layers:
                x, extra = layer(x, **named)
                loss = loss + extra
        if not self.feature.tiled_loss:
            return loss + self.head(x).sin().sum()
        labels = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % WIDTH
        if self.ours:
            return anyrank.tiled_loss(self.head, x, labels, chunk_size=3, reduction="sum")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def build(feature: Feature, ours: bool) -> Net:
    """The model with the same weights on every rank, plain or with everything of ours."""
    torch.manual_seed(0)
    net = Net(feature)
    net = net.float() if feature.autocast else net.double()
    if not ours:
        for layer in net.layers:
            layer.loop = bool(feature.dropout)
        return net
    net.ours = True
    anyrank.tile_(
        net,
        "layers.*.mlp",
        chunk_size=CHUNK,
        in_dims={"x": 1, "route": 1, "scale": 1},
        out_dims=1,
        grad_dtype=torch.float64 if feature.wide else None,
    )
    if feature.nested:
        pool = offload_of_cpu(1 << 20) if feature.offload else None
        anyrank.recompute_(net, "layers.*", offload=pool)
    return net


def batch(wrapper: str, feature: Feature, step: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Input of this rank: ranks have different numbers of rows, and so of tiles, where they may."""
    rank = dist.get_rank() if dist.is_initialized() and wrapper != "tp" else 0
    generator = torch.Generator().manual_seed(17 * rank + step)
    rows = feature.rows if feature.rows is not None else 10 - 3 * (rank % 3) - step
    dtype = torch.float32 if feature.autocast else torch.float64
    x = torch.randn(2, rows, WIDTH, generator=generator, dtype=dtype)
    if feature.transposed:
        x = torch.randn(rows, 3, WIDTH, generator=generator, dtype=dtype).transpose(0, 1)
    named: dict[str, Any] = {}
    if feature.keyword:
        named["scale"] = torch.randn(*x.shape[:2], 1, generator=generator, dtype=dtype)
    if feature.experts:
        route = torch.zeros(x.shape[:2], dtype=torch.bool)
        if feature.experts == "some":
            route[:, 2:3] = True
            route[:, -1:] = True
        elif feature.experts == "first tile" or rank:
            route[:, :2] = True
        named["route"] = route
    return x, named


# -- wrappers -------------------------------------------------------------------------------------


def ddp(**options: Any) -> Callable[[Net], nn.Module]:
    return lambda net: DistributedDataParallel(net, **options)


def ddp_bf16(net: Net) -> nn.Module:
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(None, reduce_in_bf16)
    return wrapped


def reduce_in_bf16(state, bucket):  # DDP looks at annotations, and would find strings
    """As torch's hook of that name, which wants NCCL."""
    buffer = bucket.buffer()
    small = (buffer / dist.get_world_size()).bfloat16()
    work: Any = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def fsdp(unit: str = "layer", **options: Any) -> Callable[[Net], nn.Module]:
    def wrap(net: Net) -> nn.Module:
        for layer in net.layers:
            if unit == "mlp":
                fully_shard(layer.mlp, **options)
            fully_shard(layer, **options)
        return fully_shard(net, **options)

    return wrap


def tensor_parallel(net: Net) -> nn.Module:
    """The MLPs' matrices over all ranks, which have the same input."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        parallelize_module(layer.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": ddp(),
    "ddp, find unused": ddp(find_unused_parameters=True),
    "ddp, static graph": ddp(static_graph=True),
    "ddp, bucket view": ddp(gradient_as_bucket_view=True, bucket_cap_mb=1e-4),
    "ddp, bf16 hook": ddp_bf16,
    "ddp, no_sync": ddp(),
    "fsdp": fsdp(reshard_after_forward=True),
    "fsdp, unit is the mlp": fsdp(unit="mlp", reshard_after_forward=True),
    "fsdp, no reshard": fsdp(reshard_after_forward=False),
    "fsdp, mixed precision": fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
    "fsdp, sync off": fsdp(),
    "tp": tensor_parallel,
}


@contextlib.contextmanager
def without_sync(model: Any) -> Any:
    """Gradients of this pass stay on the rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield
