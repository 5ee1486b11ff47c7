"""Promise 9 with exact=True: any optimizer that treats each element by itself, and a GradScaler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import digests_on, sha256, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

KINDS = ("plain", "ddp", "fsdp")


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
    if kind == "fsdp":
        fully_shard(net[0])
        fully_shard(net)
    return DistributedDataParallel(net) if kind == "ddp" else net


def rows() -> torch.Tensor:
    return torch.randn(23, 7, generator=torch.Generator().manual_seed(1))


def train(kind: str, make: Callable[[Any], torch.optim.Optimizer]) -> str:
    net = build(kind)
    optimizer = make(net.parameters())
    loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
    for step in loader:
        for batch in step.microbatches(net):
            step.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert loader.step == 3
    return sha256(net, optimizer)


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


class Scaled(torch.optim.Optimizer):
    """Steps by the gradient over its norm, as LARS; `noise` is added, and `more` is not kept."""

    def __init__(self, params: Any, more: str, noise: float = 0.0) -> None:
        super().__init__(params, {"noise": noise})
        assert more

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["noise"]:
                    parameter.add_(torch.rand_like(parameter) * group["noise"])
                else:
                    parameter.sub_(parameter.grad / parameter.grad.norm())


class Normed(Scaled):
    def __init__(self, params: Any, noise: float = 0.0) -> None:
        super().__init__(params, "more", noise)


class Quantised(torch.optim.Optimizer):
    """Rounds gradients by blocks, but for small tensors, as optimizers with 8-bit state do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad
            if update.numel() >= 4096:
                scale = update.abs().max() / 127
                update = (update / scale).round() * scale
            parameter.sub_(update)


class Factored(torch.optim.Optimizer):
    """Divides by the mean of a row and of a column, where a matrix has 128 of both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad
            if update.ndim == 2 and min(update.shape) >= 128:
                squares = update.square()
                update = update / (squares.mean(0) * squares.mean(1, keepdim=True) + 1e-9).sqrt()
            parameter.sub_(update)


def job_tried() -> dict[str, str]:
    """What the first step with FSDP2 says, for optimizers that look beyond an element."""
    found: dict[str, str] = {}
    makers: dict[str, Any] = {
        "fused": lambda params: torch.optim.AdamW(params, lr=0.0, fused=True),
        "normed": Normed,
        "noisy": lambda params: Normed(params, 0.1),
        "unknown": lambda params: Scaled(params, "more"),
        "adam": torch.optim.Adam,
        "quantised": Quantised,
        "factored": Factored,
    }
    for name, make in makers.items():
        net = build("fsdp", 200 if name == "factored" else 41)
        optimizer = make(net.parameters())
        loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
        before = torch.get_rng_state()
        try:
            for step in loader:
                for batch in step.microbatches(net):
                    step.backward(net(batch).square().mean())
                weights = [whole(p).clone() for p in net.parameters()]
                optimizer.step()
                break
            found[name] = " ".join(loader.notes)
        except ValueError as error:
            found[name] = str(error)
            now = [whole(p) for p in net.parameters()]
            assert all(map(torch.equal, weights, now))
            assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), before)
        optimizer.step()  # outside of the loop nothing is tried
    return found


@pytest.mark.exact_fsdp
def test_an_optimizer_whose_bits_depend_on_the_shards_is_refused_at_its_first_step() -> None:
    first, second = run_ranks(2, job_tried)
    assert first == second
    assert "AdamW(fused=True) steps sharded parameters" in first["fused"]
    assert "Normed gives an element other bits" in first["normed"]
    assert "Normed gives an element other bits" in first["noisy"]
    assert "a trial of Scaled failed" in first["unknown"]
    assert "missing 1 required positional argument: 'more'" in first["unknown"]
    assert first["adam"] == ""
    assert "Quantised gives an element other bits" in first["quantised"]
    assert "Factored gives an element other bits" in first["factored"]


class Built(torch.optim.SGD):
    """Counts how often it is made."""

    number = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Built.number += 1


def job_trials() -> list[int]:
    """How many optimizers there have been after each step of two passes."""
    net = build("fsdp")
    optimizer = Built(net.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(rows(), global_batch=10, microbatch=2, exact=True)
    found: list[int] = []
    for _ in range(2):
        for step in loader:
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
            optimizer.step()
            found.append(Built.number)
    return found


@pytest.mark.exact_fsdp
def test_an_optimizer_is_tried_once() -> None:
    for found in run_ranks(2, job_trials):
        assert len(found) > 3
        assert found[0] > 1, "no trial"
        assert len({*found}) == 1, "tried again"


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
        assert "LBFGS steps sharded parameters, and its dot products" in found[f"LBFGS {kind}"]
    rounded = found["SGD bfloat16"]
    assert "SGD gives an element of torch.bfloat16 other bits" in rounded
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.flo" in rounded
    assert "AdamW steps weight, a sharded parameter of torch.complex64" in found["AdamW complex64"]
    assert "call torch.view_as_complex in the forward" in found["AdamW complex64"]


def job_warned() -> list[str]:
    """What TrainState says of complex parameters, by optimizer and wrapper."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("anyrank.state").addHandler(handler)
    for make in (torch.optim.AdamW, torch.optim.SGD):
        for dtype in (torch.complex64, torch.float32):
            for wrap in (fully_shard, nn.Sequential):
                net: Any = wrap(nn.Linear(7, 5, dtype=dtype))
                anyrank.TrainState(net, make(net.parameters(), lr=0.1))
    return [record.getMessage() for record in records]


def test_a_sharded_complex_parameter_is_warned_of_without_exact() -> None:
    (text,), others = run_ranks(2, job_warned)
    assert text.startswith("optimizer: group 0 has complex parameters that are sharded, of shape [")
    assert others == []
    assert run_ranks(1, job_warned) == [[]]  # where the view is none of a copy


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
