"""Promise 9 with exact=True: optimizers that treat each element by itself, and a GradScaler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import KINDS, digests_on, run, sha256, whole, wrap
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                update = state["average"].lerp(parameter.grad, 1 - group["beta"]).sign_()
                parameter.mul_(1 - 0.1 * group["lr"]).add_(update, alpha=-group["lr"])
                state["average"].lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw for-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "lion": lambda params: Lion(params, lr=1e-2),
}


def build(kind: str, width: int = 41) -> nn.Module:
    """Odd sizes, whose shards end at other elements on each number of ranks."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Linear(7, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 3)
    )
    return wrap(net, kind, net[0])


def rows() -> torch.Tensor:
    return torch.randn(23, 7, generator=torch.Generator().manual_seed(1))


def train(kind: str, make: Callable[[Any], torch.optim.Optimizer]) -> str:
    net = build(kind)
    optimizer = make(net.parameters())
    loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
    digest = run(net, optimizer, loader)
    assert loader.step == 3
    return digest


def job_optimizers() -> dict[str, str]:
    return {
        f"{name} {kind}": train(kind, make)
        for name, make in OPTIMIZERS.items()
        for kind in KINDS
        if (name, kind) != ("adamw fused", "fsdp")
    }


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_with_any_elementwise_optimizer() -> None:
    alone = digests_on((3,), job_optimizers)
    for name in OPTIMIZERS:
        assert len({alone[case] for case in alone if case.startswith(name + " ")}) == 1, name
    assert len(set(alone.values())) >= 4


def job_judged() -> dict[str, str]:
    """What the first step with FSDP2 says, for optimizers that are not proved."""
    found: dict[str, str] = {}
    makers: dict[str, Any] = {
        "fused": lambda params: torch.optim.AdamW(params, lr=0.0, fused=True),
        "factored": torch.optim.Adafactor,
        "unknown": lambda params: Lion(params, lr=1e-2),
        "adam": torch.optim.Adam,
    }
    for name, make in makers.items():
        net = build("fsdp")
        optimizer = make(net.parameters())
        loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
        before = torch.get_rng_state()
        for step in loader:
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
            weights = [whole(p).clone() for p in net.parameters()]
            try:
                optimizer.step()
            except ValueError as error:
                found[name] = str(error)
                now = [whole(p) for p in net.parameters()]
                assert all(map(torch.equal, weights, now))
                assert not optimizer.state
                break
            found[name] = " ".join(loader.notes)
        assert torch.equal(torch.get_rng_state(), before)
        gc.collect()  # ends loops that earlier tests on this rank have left by an error
        if name != "factored":  # torch's own fails on shards
            optimizer.step()  # outside of the loop nothing is judged
    return found


@pytest.mark.exact_fsdp
def test_an_optimizer_whose_bits_depend_on_the_shards_is_refused_at_its_first_step() -> None:
    first, second = run_ranks(2, job_judged)
    assert first == second
    assert "AdamW(fused=True) steps sharded parameters, and its kernel" in first["fused"]
    assert "Adafactor steps sharded parameters, but its means run over rows" in first["factored"]
    assert "Lion is not verified" in first["unknown"]
    assert first["unknown"].count("exact=True") == 1, "noted again"
    assert first["adam"] == ""


def job_by_kind() -> dict[str, str]:
    """What the first step of a sharded parameter says, by its dtype and optimizer."""
    found: dict[str, str] = {}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
        "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for name, make in makers.items():
            torch.manual_seed(0)
            net: Any = fully_shard(nn.Linear(7, 5, dtype=dtype))
            optimizer = make(net.parameters())
            loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
            key = f"{name} {str(dtype)[6:]}"
            try:
                for step in loader:
                    for batch in step.microbatches(net):
                        step.backward(net(batch.to(dtype)).abs().float().square().mean())
                    optimizer.step()  # type: ignore[call-arg]
                    optimizer.zero_grad()
                found[key] = sha256(net, optimizer)
            except ValueError as error:
                found[key] = str(error)
            assert loader.notes == [], key
    return found


@pytest.mark.exact_fsdp
def test_an_optimizer_is_refused_for_the_dtypes_that_it_steps_by_shard() -> None:
    found = digests_on((3,), job_by_kind)
    trained = {key for key, text in found.items() if not text.startswith("exact=True")}
    assert trained == {"SGD float32", "AdamW float32", "AdamW bfloat16", "SGD complex64"}
    for kind in ("float32", "bfloat16", "complex64"):
        assert "LBFGS steps sharded parameters, but its dot products" in found[f"LBFGS {kind}"]
    rounded = found["SGD bfloat16"]
    assert "SGD's result for torch.bfloat16 depends on where a shard ends" in rounded
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.flo" in rounded
    assert "AdamW steps a sharded parameter of torch.complex64" in found["AdamW complex64"]
    assert "call torch.view_as_complex in the forward" in found["AdamW complex64"]


def job_all_infinite() -> list[Any]:
    """Every rank's gradients are inf in its first step."""
    found: list[Any] = []
    for exact in (False, True):
        net = nn.Linear(7, 2)
        loader = anyrank.ElasticLoader(rows()[:8].abs(), global_batch=8, microbatch=2, exact=exact)
        for step in loader:
            for batch in step.microbatches(net):
                step.backward((net(batch) * torch.inf).sum())
        found.append(net.weight.grad.isinf().all().item())
    return found


def test_ranks_that_all_overflow_are_not_taken_for_ranks_that_have_exchanged() -> None:
    assert run_ranks(2, job_all_infinite) == [[True, True]] * 2


def overflowing(kind: str, everywhere: bool) -> tuple[str, list[float]]:
    """Train with a GradScaler; losses overflow in step 1, and with `everywhere` in step 0."""
    net = build(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
    scales: list[float] = []
    for step in loader:
        for batch in step.microbatches(net):
            loss = net(batch).square().mean()
            if (step.number == 1 and step.k == 1) or (everywhere and step.number == 0):
                loss = loss * torch.inf
            scaler.scale(step.scale(loss)).backward()
        scaler.unscale_(optimizer)
        step.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return sha256(net, optimizer), scales


def job_overflowing() -> dict[str, Any]:
    return {
        f"{kind} {everywhere}": overflowing(kind, everywhere)
        for kind in KINDS
        for everywhere in (False, True)
    }


@pytest.mark.exact_fsdp
def test_an_overflow_in_one_microbatch_skips_the_step_on_all_ranks() -> None:
    alone = digests_on((3,), job_overflowing)
    first, second = [{str(alone[f"{kind} {case}"]) for kind in KINDS} for case in (False, True)]
    assert len(first) == len(second) == 1, alone
    assert alone["plain False"][1] == [256.0, 128.0, 128.0]
    assert alone["plain True"][1] == [128.0, 64.0, 64.0]
