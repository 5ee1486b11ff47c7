"""Promise 5: one hook firing per parameter per backward, and the gradients of the plain layer.

Each cell builds a model twice, plain and with tiles, regions, offload and tiled loss, puts both
into the same wrapper, and runs two steps with other numbers of rows on every rank. Gradients in
float64 and the firings of three kinds of hook have to be equal.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.offloads import offload_of_cpu
from tests.ranks.memory_models import (
    FEATURES,
    WRAPPERS,
    Feature,
    Net,
    batch,
    build,
    without_sync,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import anyrank
from anyrank.testing import run_ranks

Outcome = tuple[dict[str, torch.Tensor | None], dict[str, int]]
DISTRIBUTED = [name for name in WRAPPERS if name != "plain"]

# Cells in which the plain model itself fails, or that the wrapper has no meaning for.
LEFT_OUT: dict[str, list[str]] = {
    # DDP finds out about unused parameters only when asked to, and takes no autograd.grad
    "ddp": ["expert unused on a rank", "outer grad"],
    "ddp, find unused": ["outer grad"],
    "ddp, static graph": ["expert unused on a rank", "outer grad"],
    "ddp, bucket view": ["expert unused on a rank", "outer grad"],
    "ddp, bf16 hook": ["expert unused on a rank", "outer grad"],
    "ddp, no_sync": ["expert unused on a rank", "outer grad"],
    # FSDP2 reduces what has gradients, and waits for ever for a rank that has more
    **{n: ["expert unused on a rank", "outer grad"] for n in WRAPPERS if n.startswith("fsdp")},
    # there the plain loop over tiles calls the unit, on some ranks more often
    "fsdp, unit is the mlp": [
        "expert unused on a rank",
        "outer grad",
        "dropout",
        "nested, dropout, twice",
    ],
    # a linear of DTensors takes no batch without rows
    "tp": ["empty"],
}


def count_firings(net: nn.Module, sharded: bool) -> collections.Counter[str]:
    """Count three kinds of hook of every parameter from here on."""
    counter: collections.Counter[str] = collections.Counter()
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue

        def count(*_: Any, name: str = name) -> None:
            counter[name] += 1

        parameter.register_post_accumulate_grad_hook(
            lambda *_, name=name: count(name=f"{name}: post accumulate")
        )
        if sharded:  # FSDP2's parameters are not the ones that the graph has
            continue
        parameter.register_hook(lambda *_, name=name: count(name=f"{name}: tensor"))
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: count(name=f"{name}: AccumulateGrad"))
        parameter.keeps_alive = node
    return counter


def run_cell(wrapper: str, feature: Feature, ours: bool) -> Outcome:
    net = build(feature, ours)
    sharded = wrapper.startswith("fsdp") or wrapper == "tp"
    model: Any = WRAPPERS[wrapper](net)
    counter = count_firings(net, sharded)
    if feature.compiled:
        torch.compiler.reset()
        model = torch.compile(model, backend="eager")
    grads: dict[str, torch.Tensor | None] = {}
    for step in range(2):
        x, named = batch(wrapper, feature, step)
        x.requires_grad_(not feature.frozen_input)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter) if feature.filled else None
        if feature.error and step == 0:
            fail_once(net, model, x, named)
        torch.manual_seed(step)
        if wrapper in ("ddp, no_sync", "fsdp, sync off"):
            with without_sync(model):
                model(x, named).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=feature.autocast):
            loss = model(x, named)
        if feature.outer_grad:
            wanted = dict(net.named_parameters()) | {"x": x}
            found = torch.autograd.grad(loss, list(wanted.values()))
            grads |= {f"{step} {n}": whole(g) for n, g in zip(wanted, found, strict=True)}
            continue
        loss.backward()
        grads[f"{step} x"] = x.grad
        for name, parameter in net.named_parameters():
            grads[f"{step} {name}"] = whole(parameter.grad)
    return grads, dict(counter)


def fail_once(net: Net, model: Any, x: torch.Tensor, named: dict[str, torch.Tensor]) -> None:
    """A forward pass that ends in the middle of a tile, on every rank."""
    net.layers[1].mlp.fail_at = net.layers[1].mlp.calls + 1
    with pytest.raises(KeyError):
        model(x, named)
    net.layers[1].mlp.fail_at = -1


def whole(grad: Any) -> torch.Tensor | None:
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    return None if grad is None else grad.clone()


def differences(ours: Outcome, plain: Outcome, tolerance: float) -> list[str]:
    found: list[str] = []
    for name, wanted in plain[0].items():
        grad = ours[0][name]
        if grad is None or wanted is None:
            found += [] if grad is wanted else [f"{name} is None for one"]
        elif not torch.allclose(grad, wanted, rtol=tolerance, atol=tolerance):
            found.append(f"{name} differs by {(grad - wanted).abs().max():.3g}")
    if ours[1] != plain[1]:
        found.append(f"hooks fired {ours[1]}, and {plain[1]} times for the plain model")
    return found


def job(wrapper: str, names: list[str]) -> dict[str, list[str]]:
    torch.manual_seed(0)
    problems: dict[str, list[str]] = {}
    for name in names:
        feature = FEATURES[name]
        tolerance = 1e-10
        if feature.autocast or wrapper == "ddp, bf16 hook":
            tolerance = 5e-2
        elif wrapper == "fsdp, mixed precision":
            tolerance = 1e-4
        plain = run_cell(wrapper, feature, ours=False)
        ours = run_cell(wrapper, feature, ours=True)
        backwards = 4 if wrapper in ("ddp, no_sync", "fsdp, sync off") else 2
        found = differences(ours, plain, tolerance)
        counts = set(ours[1].values())
        if not feature.outer_grad and not counts <= {backwards, backwards // 2}:
            found.append(f"hooks fired {ours[1]} times in {backwards} backward passes")
        if found:
            problems[name] = found
    return problems


# What differs in the order of its hooks; every feature runs in the wrappers of WHOLE.
SOME = ["tied", "called twice", "expert unused in the last tile", "frozen input", "grad filled"]
SOME += ["dropout", "error, then a good step", "nested, offload, tiled loss", "wide sums"]
WHOLE = ("plain", "ddp", "ddp, find unused", "fsdp", "fsdp, unit is the mlp", "tp")


def cells(wrapper: str) -> list[str]:
    names = FEATURES if wrapper in WHOLE else SOME
    compiled = {
        "plain": ["compiled, a graph per tile", "compiled, nested, offload"],
        "ddp": ["compiled"],
    }
    chosen = [n for n in names if not FEATURES[n].compiled or n in compiled.get(wrapper, [])]
    return [name for name in chosen if name not in LEFT_OUT.get(wrapper, [])]


@pytest.mark.parametrize("wrapper", ["plain", "ddp, static graph", "fsdp, unit is the mlp"])
def test_one_rank(wrapper: str) -> None:
    assert run_ranks(1, job, wrapper, cells(wrapper)) == [{}]


@pytest.mark.parametrize("wrapper", DISTRIBUTED)
def test_two_ranks_with_different_numbers_of_tiles(wrapper: str) -> None:
    assert run_ranks(2, job, wrapper, cells(wrapper)) == [{}] * 2


FOUR = ["called twice", "expert unused in the last tile", "frozen input", "nested", "wide sums"]
FOUR += ["nested, offload, tiled loss"]


@pytest.mark.parametrize("wrapper", ["ddp, find unused", "fsdp, unit is the mlp"])
def test_four_ranks(wrapper: str) -> None:
    assert run_ranks(4, job, wrapper, FOUR) == [{}] * 4


def job_sharded_activations() -> list[bool]:
    """Activations that are DTensors, as sequence parallelism has them, go to the host and back."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = torch.randn(8, 5, dtype=torch.float64)
    offload = offload_of_cpu(1 << 20, keep_last=0)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.exp()

    results: list[torch.Tensor] = []
    for call in (block, lambda x: anyrank.recompute(block, x, offload=offload)):
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        call(call(x * 1)).sum().backward()
        results.append(x.grad.full_tensor())
    local = whole.numel() * 8 // dist.get_world_size()
    return [torch.equal(*results), offload.stats().copied_bytes == 2 * local]


def test_sharded_activations_move_by_their_local_part() -> None:
    assert run_ranks(2, job_sharded_activations) == [[True, True]] * 2
