"""One step beside the documented path of exact=True: the same bits, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import KINDS, digests_on, sha256, wrap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import anyrank
from anyrank.testing import run_ranks


class Net(nn.Module):
    """Odd sizes; `recomputes` its first half in the backward."""

    def __init__(self, dtype: torch.dtype = torch.float32, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13, dtype=dtype)
        self.last = nn.Linear(13, 3, dtype=dtype)
        self.recomputes = recomputes

    def start(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return hidden if hidden.is_complex() else nn.functional.dropout(hidden, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.weight.dtype)
        hidden = (
            checkpoint(self.start, x, use_reentrant=False) if self.recomputes else self.start(x)
        )
        return self.last(hidden).abs().float()


def train(
    kind: str,
    net: Net,
    weight: Callable[[torch.Tensor], float | None] = lambda _: None,
) -> str:
    """Two steps of five microbatches, and one of three; two optimizers that clip apart."""
    model = wrap(net, kind, net.first)
    optimizers = [
        torch.optim.AdamW(net.first.parameters(), lr=0.1, eps=1e-4),
        torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9),
    ]
    data = torch.randn(25, 7, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(data, global_batch=10, microbatch=2, exact=True)
    for step in loader:
        net.first.requires_grad_(step.number != 1)
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean(), weight(batch))
        step.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            if step.number != 1 or optimizer is optimizers[1]:
                optimizer.step()
        net.zero_grad()
    return sha256(net, optimizers[0]) + sha256(net, optimizers[1])


def job_trained() -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in KINDS:
        for name, net in {
            "recomputed": lambda: Net(recomputes=True),
            "float16": lambda: Net(torch.float16),
            "float64": lambda: Net(torch.float64),
        }.items():
            if (name, kind) == ("float16", "fsdp"):
                continue  # SGD's kernel for it rounds otherwise at the end of a shard: refused
            torch.manual_seed(0)
            found[f"{name} {kind}"] = train(kind, net())
        torch.manual_seed(0)
        found[f"no weight {kind}"] = train(kind, Net(), lambda _: 0.0)
        torch.manual_seed(0)
        found[f"rare weight {kind}"] = train(kind, Net(), lambda x: float(x[0, 0] > 1.0) * 1e5)
        if kind != "fsdp":  # where float32 and complex parameters cannot share a unit
            torch.manual_seed(0)
            found[f"complex {kind}"] = train(kind, Net(torch.complex64))
    return found


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_with_unusual_parameters_and_weights() -> None:
    alone = digests_on((2, 3), job_trained)
    for name in ("recomputed", "float16", "float64", "no weight", "rare weight", "complex"):
        assert len({alone[key] for key in alone if key.startswith(name)}) == 1, name


def job_refused() -> list[str]:
    """Loops that would give other bits on other rank counts, without a word of torch."""
    found: list[str] = []

    def attempt(model: Any, body: Callable[[Any, Any, int], None]) -> None:
        loader = anyrank.ElasticLoader(
            torch.arange(16), global_batch=8, microbatch=2, exact=True, shuffle=False
        )
        try:
            for step in loader:
                for number, batch in enumerate(step.microbatches(model)):
                    body(step, batch, number)
        except (ValueError, anyrank.AnyrankError) as error:
            found.append(f"{type(error).__name__}: {error}")

    net: Any = fully_shard(nn.Linear(1, 1))

    def held_back(step: Any, batch: torch.Tensor, number: int) -> None:
        net.set_requires_gradient_sync(number == 1)
        step.backward(net(batch[:, None].float()).square().mean())

    attempt(net, held_back)
    part = nn.Linear(1, 1)
    part.bias.requires_grad_(False)

    def thawed(step: Any, batch: torch.Tensor, number: int) -> None:
        part.bias.requires_grad_(True)
        step.backward(part(batch[:, None].float()).square().mean())

    attempt(part, thawed)
    return found


@pytest.mark.exact_fsdp
def test_what_torch_would_add_up_in_another_order_is_refused_on_all_ranks() -> None:
    for found in run_ranks(2, job_refused, timeout=100):
        texts = (
            "ValueError: exact=True: set_requires_gradient_sync(False) was called",
            "ValueError: exact=True: ['bias'] were frozen when the loop",
        )
        assert len(found) == len(texts), found
        assert all(text in one for text, one in zip(texts, found, strict=True)), found
