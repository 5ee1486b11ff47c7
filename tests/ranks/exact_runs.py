"""What the tests of exact=True compare: SHA-256 of a run's weights and optimizer state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

KINDS = ("plain", "ddp", "fsdp")


def wrap(net: Any, kind: str, *units: nn.Module) -> Any:
    """One of KINDS; with FSDP2 the units are sharded first."""
    if kind == "fsdp":
        for unit in units:
            fully_shard(unit)
        fully_shard(net)
    return DistributedDataParallel(net) if kind == "ddp" else net


def mean_square(net: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor]:
    return (net(batch).float().square().mean(),)


def run(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: anyrank.ElasticLoader,
    loss: Any = mean_square,
    clip: float | None = None,
) -> str:
    """Train an epoch; `loss` gives what `step.backward` takes. The digest of the run."""
    for step in loader:
        for batch in step.microbatches(net):
            step.backward(*loss(net, batch))
        if clip is not None:
            step.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return sha256(net, optimizer)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def sha256(net: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.Tensor) -> str:
    """Of all weights and of all optimizer state, in the order of the parameters."""
    digest = hashlib.sha256()
    tensors: list[Any] = list(others)
    for parameter in net.parameters():
        state = optimizer.state.get(parameter, {})
        values = (state[name] for name in sorted(state))
        tensors += [parameter, *(value for value in values if isinstance(value, torch.Tensor))]
    for tensor in tensors:
        digest.update(whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_on(sizes: tuple[int, ...], job: Any) -> dict[str, str]:
    """The digests of a job on one rank, by case, once those of other rank counts are equal."""
    alone: dict[str, str] = run_ranks(1, job)[0]
    for size in sizes:
        for found in run_ranks(size, job):
            assert found == alone, (size, {name for name in alone if found[name] != alone[name]})
    return alone
