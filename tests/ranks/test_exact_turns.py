"""exact=True under FSDP2: the ranks take turns, and units are exchanged in every microbatch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.ranks import test_exact_ranks as usual
from tests.ranks.exact_runs import sha256, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.exact.fsdp import OrderedReduceScatter
from anyrank.testing import run_ranks

KINDS = ("fsdp", "rich fsdp", "bf16", "ddp", "rich ddp")
# What is tested ends with the gradients, which its state has whole. Of AdamW's ops torch looks up
# the sharding of each for each shape, which takes longer than all else.
momentum = partial(torch.optim.SGD, momentum=0.9)


@contextmanager
def counting_nodes() -> Generator[list[int], None, None]:
    """Yields how many nodes each exchange of a unit leaves on this rank."""
    kept: list[int] = []
    exchange = OrderedReduceScatter.exchange

    def noted(self: OrderedReduceScatter, *arguments: Any) -> None:
        exchange(self, *arguments)
        kept.append(len(self.kept.nodes))
        for _, value in self.kept.nodes:
            is_whole = value is None or value.untyped_storage().nbytes() == value.nbytes
            assert is_whole or self.rounds.is_last

    OrderedReduceScatter.exchange = noted  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        OrderedReduceScatter.exchange = exchange  # type: ignore[method-assign]


def job_all() -> dict[str, str]:
    found = {
        kind: usual.job_train(
            kind.removeprefix("rich "), rich=kind.startswith("rich"), make=momentum
        )
        for kind in KINDS
    }
    if torch.distributed.get_world_size() == 4:  # otherwise it is fsdp
        assert usual.job_train("hsdp", make=momentum) == found["fsdp"]
    found |= {job.__name__: job("fsdp") for job in (usual.job_adversaries, usual.job_left_unsynced)}
    found |= usual.job_buckets()
    return found | {f"mixed {workers}": job_mixed(workers) for workers in (0, 2)}


def job_turns() -> dict[str, str]:
    with counting_nodes() as kept:
        found = job_all()
    if torch.distributed.get_world_size() > 1:
        assert len(kept) > 50
        assert 2 <= max(kept) <= 4  # of K = 6 and 10
    return found


class Mixed(nn.Module):
    """Two units of FSDP2 without a common root, and a part that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(4, 7)
        self.head = nn.Linear(7, 1)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(x)
        return self.head(torch.tanh(hidden if self.skips else hidden + self.first(x)))


def job_mixed(num_workers: int, skips: bool = False) -> str:
    """Such a model, and one under DDP, in the same loop; `skips`: pairs of microbatches do."""
    torch.manual_seed(0)
    net, other = Mixed(), nn.Linear(1, 1)
    for unit in (net.first, net.last):
        fully_shard(unit)
    wrapped = DistributedDataParallel(other)
    optimizer = momentum([*net.parameters(), *other.parameters()], lr=0.01)
    # A copy would skip with its original, and not with its round.
    rows = torch.randn(40 if skips else 37, 4, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(
        rows, global_batch=20, microbatch=2, exact=True, num_workers=num_workers
    )
    for step in loader:
        for batch in step.microbatches(net):
            net.skips = skips and step.k // 2 % 2 == 1
            step.backward(net(batch).square().mean(), float(len(batch)))
        for batch in step.microbatches(wrapped):
            with torch.no_grad():
                out = net(batch)
            step.backward(wrapped(out).square().mean())
        step.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return sha256(net, optimizer, *(whole(p) for p in other.parameters()))


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_where_ranks_take_turns() -> None:
    alone = run_ranks(1, job_all, timeout=100)[0]
    for size in (2, 3, 4):
        assert run_ranks(size, job_turns, timeout=150) == [alone] * size, size


def job_skips() -> str:
    """On two ranks a round is a pair of microbatches."""
    with counting_nodes():
        return job_mixed(0, skips=True)


@pytest.mark.exact_fsdp
def test_a_unit_that_whole_rounds_skip() -> None:
    alone = run_ranks(1, job_mixed, 0, True, timeout=100)[0]
    assert run_ranks(2, job_skips, timeout=100) == [alone] * 2
    assert alone != run_ranks(1, job_mixed, 0, timeout=100)[0]


def job_behind() -> str:
    """A model under FSDP2 behind a first one without."""
    models: list[Any] = [nn.Linear(4, 1), fully_shard(nn.Linear(4, 1))]
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=8, microbatch=2, exact=True)
    try:
        for step in loader:
            for model in models:
                for batch in step.microbatches(model):
                    step.backward(model(batch).square().mean())
    except ValueError as error:
        return str(error)
    return ""


def test_units_behind_a_first_model_without_are_refused_on_all_ranks() -> None:
    assert run_ranks(1, job_behind) == [""]
    first, second = run_ranks(2, job_behind)
    assert first == second
    assert "call microbatches() of the FSDP2 model first, or shard both" in first


def job_split() -> list[str]:
    """A step in which one microbatch has two backward passes, on all ranks but one none."""
    found: list[str] = []
    with counting_nodes():
        for wrap in (nn.Sequential, DistributedDataParallel):
            model: Any = wrap(nn.Linear(4, 3))
            rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
            loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=1, exact=True)
            try:
                for step in loader:
                    for batch in step.microbatches(model):
                        for _ in range(1 + (step.k == 4)):
                            step.backward(model(batch).square().mean())
            except ValueError as error:
                found.append(str(error))
    return found


def test_several_gradients_in_a_microbatch_are_refused_on_all_ranks() -> None:
    for size in (2, 3):
        for first, second in run_ranks(size, job_split, timeout=100):
            assert "exact=True: ['0.bias', '0.weight'] got gradients more than once" in first
            assert "exact=True: ['module.bias', 'module.weight'] got gradients more than" in second
