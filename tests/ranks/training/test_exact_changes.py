"""exact=True: what changes a model within the loop, or lies outside of it, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import digests_on, run, wrap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


def rows() -> torch.Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


def attempt(model: Any, parameters: Any = (), between: Callable[[], Any] = lambda: None) -> str:
    """The error of a run of three steps, of a loss with a factor that may be a parameter."""
    factor = next(iter(parameters), 1.0)
    optimizer = torch.optim.SGD([*model.parameters(), *parameters], lr=0.1)
    loader = anyrank.ElasticLoader(rows(), global_batch=8, microbatch=2, exact=True)
    try:
        for step in loader:
            for batch in step.microbatches(model):
                step.backward((model(batch) * factor).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            between()
    except ValueError as error:
        return f"step {step.number}: {error}"
    return "no error"


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().long())


class Scaling(nn.Module):
    """Changes its parameter in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.div_(1 + x.norm())
        return self.inner(x)


def stepping(net: nn.Module) -> nn.Module:
    """A model whose optimizers step in the backward."""
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    return net


def job_refused() -> dict[str, str]:
    frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval())
    affine = nn.BatchNorm1d(6, momentum=None)
    affine.num_batches_tracked = None  # no version counts its statistics
    late = nn.Sequential(nn.Linear(6, 6), affine.eval())
    sharded: Any = fully_shard(nn.Linear(6, 2))
    return {
        "max_norm": attempt(DistributedDataParallel(Tokens())),
        "forward": attempt(DistributedDataParallel(Scaling())),
        "hook": attempt(DistributedDataParallel(stepping(nn.Linear(6, 2)))),
        "train": attempt(DistributedDataParallel(frozen), between=frozen.train),
        "statistics": attempt(late, between=late.train),
        "outside": attempt(nn.Linear(6, 2), [nn.Parameter(torch.ones(1))]),
        "hooked": attempt(stepping(sharded)),
        "broadcast": attempt(DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), Buffered()))),
    }


class Buffered(nn.Module):
    """Its buffer is what DDP broadcasts, and stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2,), torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.nan_to_num(2.0)[0]


def test_changes_within_the_loop_and_gradients_outside_of_it_are_refused_on_all_ranks() -> None:
    for found in (*run_ranks(1, job_refused), *run_ranks(2, job_refused)):
        assert "step 0: exact=True: " in found["max_norm"]
        assert "table is an Embedding with max_norm" in found["max_norm"]
        assert "step 0: exact=True: the loop over microbatches() changed [" in found["forward"]
        assert "inner.weight" in found["forward"]
        assert "SGD.step() was called inside the loop over microbatches()" in found["hook"]
        assert "step 1: exact=True: the loop over microbatches() changed [" in found["train"]
        assert "step 1: exact=True: " in found["statistics"]
        assert "1.running_mean" in found["statistics"]
        assert "parameter 2 of group 0 of the optimizer, of shape [1]," in found["outside"]
        assert "step 0: exact=True: weight has a gradient hook" in found["hooked"]
        assert found["broadcast"] == "no error"


def autocast(kind: str) -> str:
    """A run within an autocast that spans all of its microbatches."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2))
    net = wrap(net, kind, net[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = anyrank.ElasticLoader(rows(), global_batch=12, microbatch=2, exact=True)
    with torch.autocast("cpu", torch.bfloat16):
        return run(net, optimizer, loader)


def job_autocast() -> dict[str, str]:
    return {kind: autocast(kind) for kind in ("plain", "fsdp")}


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_under_an_autocast_around_the_loop() -> None:
    alone = digests_on((2,), job_autocast)
    assert len(set(alone.values())) == 1


class Average:
    """A part with tensors of its own: the same on all ranks, or with `own` each rank's."""

    def __init__(self, net: nn.Module, decay: float, own: bool) -> None:
        self.net, self.decay, self.own = net, decay, own
        self.values = {n: torch.zeros(p.shape) for n, p in net.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        for name, parameter in self.net.named_parameters():
            self.values[name].lerp_(parameter, 1 - self.decay).add_(rank if self.own else 0)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def train(folder: str, net: Any, optimizer: Any, average: Any, until: int) -> None:
    """Go on with a run whose weights are averaged by an object of the script's own."""
    loader = anyrank.ElasticLoader(rows(), global_batch=8, microbatch=2, exact=True)
    state = anyrank.TrainState(net, optimizer, data=loader, average=average)
    with anyrank.Checkpoints(folder, state, every=1) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            average.update()


def averaged(folder: str, decay: float = 0.5, own: bool = False) -> None:
    """A run of two steps with an average of its weights as a part."""
    torch.manual_seed(0)
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(folder, net, optimizer, Average(net, decay, own), 2)


def test_a_parts_tensors_are_compared_where_all_ranks_have_the_same(tmp_path: Any) -> None:
    run_ranks(1, averaged, f"{tmp_path}/one")
    run_ranks(2, averaged, f"{tmp_path}/two")
    run_ranks(2, averaged, f"{tmp_path}/other", 0.9)
    run_ranks(2, averaged, f"{tmp_path}/own", 0.5, True)
    run_ranks(3, averaged, f"{tmp_path}/three", 0.5, True)
    assert anyrank.diff(f"{tmp_path}/one", f"{tmp_path}/two")
    own = anyrank.diff(f"{tmp_path}/one", f"{tmp_path}/own")  # each rank has its own average
    assert [name for name, is_equal in own.parts.items() if not is_equal] == ["average"]
    assert anyrank.diff(f"{tmp_path}/own", f"{tmp_path}/three")  # on other rank counts
    found = anyrank.diff(f"{tmp_path}/one", f"{tmp_path}/other")
    assert not found
    assert found.step == 1
    assert {*found.values} == {"average.values.bias@00000", "average.values.weight@00000"}
    assert all(anyrank.verify(f"{tmp_path}/{name}") for name in ("one", "two", "own"))


class Shadow:
    """An average whose tensors lie as the parameters do, and which copies what it is given."""

    def __init__(self, net: nn.Module) -> None:
        self.of = dict(net.named_parameters())
        self.values: dict[str, Any] = {n: p.detach().clone() for n, p in self.of.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            self.values[name].copy_(value)

    def update(self) -> None:
        with torch.no_grad():
            for name, parameter in self.of.items():
                self.values[name].lerp_(parameter, 0.1)


def shadowed(folder: str, is_sharded: bool, until: int) -> None:
    torch.manual_seed(0)
    net: Any = nn.Linear(6, 3)
    if is_sharded:
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(folder, net, optimizer, Shadow(net), until)


@pytest.mark.exact_fsdp
def test_a_parts_tensors_may_be_plain_or_sharded(tmp_path: Any) -> None:
    run_ranks(1, shadowed, f"{tmp_path}/one", False, 4)
    run_ranks(2, shadowed, f"{tmp_path}/two", True, 4)
    run_ranks(2, shadowed, f"{tmp_path}/moved", True, 1)
    run_ranks(1, shadowed, f"{tmp_path}/moved", False, 2)
    run_ranks(3, shadowed, f"{tmp_path}/moved", True, 4)
    for name in ("two", "moved"):
        assert anyrank.diff(f"{tmp_path}/one", f"{tmp_path}/{name}")
        found = anyrank.diff(f"{tmp_path}/one/step-00000004", f"{tmp_path}/{name}/step-00000004")
        assert found, found
        assert anyrank.verify(f"{tmp_path}/{name}")
