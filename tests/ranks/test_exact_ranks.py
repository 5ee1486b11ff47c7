"""Promise 9 with exact=True: weights and optimizer state have the same bits on any rank count."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.data import exact_sync
from anyrank.data.tree_sum import Span, TreeSum
from anyrank.testing import run_ranks

ROWS, BATCH, MICRO = 45, 12, 2  # K = 6, and a last step of 9 samples in 5 microbatches
KINDS = ("plain", "ddp", "fsdp")


class Tokens(torch.utils.data.Dataset[Any]):
    """Sample i: nine tokens of an alphabet of 37."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 37, (9,), generator=g)


class Model(nn.Module):
    """Odd sizes, dropout, a tie, a frozen part, and a part that is used by some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(24, 3, 41, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.frozen(x))


def wrap(net: Any, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=1)
    if kind == "fsdp":
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    return net


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def sha256(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and of all optimizer state, in the order of the parameters."""
    digest = hashlib.sha256()
    for parameter in net.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            digest.update(whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def job_train(kind: str, exact: bool = True, weighted: bool = False) -> str:
    torch.manual_seed(0)
    net = wrap(Model(), kind)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    loader = anyrank.ElasticLoader(
        Tokens(), global_batch=BATCH, microbatch=MICRO, seed=5, exact=exact
    )
    for step in loader:
        for batch in step.microbatches(net):
            weight = float(batch.sum()) if weighted else None
            step.backward(token_loss(net(batch), batch), weight)
        optimizer.step()
        optimizer.zero_grad()
    assert loader.step == 4
    return sha256(net, optimizer)


def job_kinds(exact: bool = True) -> dict[str, str]:
    return {kind: job_train(kind, exact) for kind in KINDS}


@pytest.fixture(scope="module")
def alone() -> str:
    """The digest of one process without a wrapper."""
    return run_ranks(1, job_train, "plain", timeout=60)[0]


def test_the_stock_reduction_gives_other_bits(alone: str) -> None:
    """The digest can tell: without exact=True it differs on three ranks."""
    assert alone not in run_ranks(3, job_kinds, False, timeout=120)[0].values()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_promise_9_the_same_bits_on_any_number_of_ranks(size: int, alone: str) -> None:
    for found in run_ranks(size, job_kinds, timeout=120):
        assert found == dict.fromkeys(KINDS, alone)


def job_reversed(kind: str) -> str:
    """A sum that adds a rank's microbatches one after the other, instead of as a tree."""

    class Chain(TreeSum):
        def add(self, span: Span, value: torch.Tensor | None) -> None:
            if self.nodes:
                (start, _), other = self.nodes.pop()
                both = value if other is None else other if value is None else other + value
                self.nodes.append((Span(start, span.stop), both))
            else:
                self.nodes.append((span, value))

    exact_sync.TreeSum = Chain  # type: ignore[misc]
    try:
        return job_train(kind)
    finally:
        exact_sync.TreeSum = TreeSum  # type: ignore[misc]


def test_another_order_of_the_sum_gives_other_bits(alone: str) -> None:
    assert run_ranks(1, job_reversed, "plain", timeout=60)[0] != alone
