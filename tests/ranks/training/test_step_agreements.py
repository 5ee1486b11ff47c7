"""How often the ranks agree in a step: once as they fetch, and once at its end where they must.

In a run with workers they agree on a step's first batches as they count the one before. Where they
must meet at a step's end: plain DDP and FSDP2 meet in the wrapper's own exchange. With weights,
with exact=True, and for parameters without a wrapper the ranks tell each other what they have seen.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from tests.ranks.spies import meetings
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

WIDTH = 6


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    if kind == "ddp":
        return DistributedDataParallel(net)
    return fully_shard(net) if kind == "fsdp" else net


def job_agreements(kind: str, exact: bool, weight: float | None, rounds: int) -> list[list[str]]:
    """What the ranks agree on in each step but the first two."""
    net = build(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = 2 * rounds * dist.get_world_size()
    rows = torch.randn(5 * batch, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=batch, microbatch=2, exact=exact)
    agreed: list[list[str]] = []
    with meetings() as met:
        for step in loader:
            agreed.append([*met])
            met.clear()
            for rows in step.microbatches(net):
                step.backward(net(rows).square().mean(), weight)
            optimizer.step()
            optimizer.zero_grad()
    return agreed[3:]


FETCH, END = "fetching a batch", "comparing the step"


@pytest.mark.parametrize("rounds", [1, 2])  # two batches are fetched ahead
@pytest.mark.parametrize(
    ("kind", "exact", "weight", "agreements"),
    [
        ("ddp", False, None, [FETCH]),
        ("fsdp", False, None, [FETCH]),
        ("plain", False, None, [FETCH, END]),
        ("ddp", False, 3.0, [FETCH, END]),
        ("plain", False, 3.0, [FETCH, END]),
        ("plain", True, None, [FETCH, END]),
        ("ddp", True, 3.0, [FETCH, END]),
        pytest.param("fsdp", True, 3.0, [FETCH, END], marks=pytest.mark.exact_fsdp),
    ],
)
def test_the_ranks_agree_once_at_the_end_of_a_step(
    kind: str, exact: bool, weight: float | None, agreements: list[str], rounds: int
) -> None:
    for steps in run_ranks(2, job_agreements, kind, exact, weight, rounds):
        assert steps == [agreements] * 2


def job_run_agreements(rounds: int, workers: int, folder: str) -> list[list[str]]:
    """As `job_agreements`, in a run."""
    net = build("ddp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = 2 * rounds * dist.get_world_size()
    rows = torch.randn(5 * batch, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=batch, microbatch=2, num_workers=workers)
    state = anyrank.TrainState(net, optimizer, data=loader)
    agreed: list[list[str]] = []
    with meetings() as met, anyrank.Checkpoints(folder, state) as ckpts:
        for step in ckpts.steps(epochs=1):
            agreed.append([*met])
            met.clear()
            for rows in step.microbatches(net):
                step.backward(net(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return agreed[3:]


COMPLETE = "completing the step"


@pytest.mark.parametrize(
    ("rounds", "workers", "agreements"),
    [
        (1, 0, [FETCH, COMPLETE]),
        (1, 1, [COMPLETE]),
        (2, 1, [COMPLETE]),
        (3, 1, [FETCH, COMPLETE]),
    ],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_ranks_of_a_run_with_workers_agree_once_a_step(
    rounds: int, workers: int, agreements: list[str], tmp_path: Path
) -> None:
    for steps in run_ranks(2, job_run_agreements, rounds, workers, str(tmp_path)):
        assert steps == [agreements] * 2


def job_kinds() -> None:
    """Sums of parameters whose gradients cannot be in one bucket, beside those by hand."""
    torch.manual_seed(0)
    net = nn.ParameterDict(
        {
            "wide": nn.Parameter(torch.zeros(3, 4).t()),  # not contiguous, and alone in its dtype
            "a": nn.Parameter(torch.zeros(2, dtype=torch.float64)),
            "b": nn.Parameter(torch.zeros(5, dtype=torch.float64)),
            "none": nn.Parameter(torch.zeros(1)),
            "some": nn.Parameter(torch.zeros(1)),
        }
    )
    table = nn.Embedding(4, 2, sparse=True)
    model = nn.ModuleList([net, table])
    loader = anyrank.ElasticLoader(torch.arange(4.0), global_batch=4, microbatch=2)
    for step in loader:
        for batch in step.microbatches(model):
            loss = net["wide"].sum() + (net["a"].sum() + 2 * net["b"].sum()).float()
            loss = loss + table(batch.long()).sum()
            if dist.get_rank() == 0:
                loss = loss + 4 * net["some"].sum()
            step.backward(loss * (1 + dist.get_rank()))
    torch.testing.assert_close(net["wide"].grad, torch.full((4, 3), 1.5))
    torch.testing.assert_close(net["a"].grad, torch.full((2,), 1.5, dtype=torch.float64))
    torch.testing.assert_close(net["b"].grad, torch.full((5,), 3.0, dtype=torch.float64))
    assert net["none"].grad is None
    torch.testing.assert_close(net["some"].grad, torch.full((1,), 2.0))
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().sum().item() == pytest.approx((2 * 2 + 2 * 2 * 2) / 2)


def test_gradients_of_any_kind_are_averaged() -> None:
    run_ranks(2, job_kinds)


def job_collectives() -> list[int]:
    """How many sums a step of eight small layers without a wrapper makes."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    loader = anyrank.ElasticLoader(torch.randn(16, WIDTH), global_batch=8, microbatch=2)
    found: list[int] = []
    for step in loader:
        sums = Mock(wraps=dist.all_reduce)
        with patch.object(dist, "all_reduce", sums):
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
        found.append(sums.call_count)
        net.zero_grad()
    return found


def test_gradients_without_a_wrapper_go_in_buckets() -> None:
    assert run_ranks(2, job_collectives) == [[1, 1]] * 2


def job_unlike(kind: str, exact: bool) -> str:
    """What the first step says of a model without a wrapper that differs between the ranks."""
    rank = dist.get_rank()
    torch.manual_seed(rank if kind == "values" else 0)
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4 + rank * (kind == "shapes")))
    before = [parameter.clone() for parameter in net.parameters()]
    loader = anyrank.ElasticLoader(torch.randn(8, WIDTH), global_batch=8, microbatch=2, exact=exact)
    try:
        for step in loader:
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
    except ValueError as error:
        assert all(map(torch.equal, before, net.parameters()))
        return str(error)
    return "no error"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("alike", "no error"),
        ("values", "0.weight is not the same on every rank (shape and hash): [4, 6] "),
        ("shapes", "1.weight is not the same on every rank (shape and hash): [4, 4] "),
    ],
)
def test_promise_8_models_without_a_wrapper_are_compared_in_the_first_step(
    kind: str, said: str, exact: bool
) -> None:
    for found in run_ranks(2, job_unlike, kind, exact):
        assert found.startswith(said)
        assert said == "no error" or "torch.manual_seed(0) before you build the model" in found


def job_first_weight_is_nothing() -> tuple[float, int]:
    """The gradient of a weight w for losses r * w of four rows r, and how often ranks agreed."""
    model = nn.Linear(1, 1, bias=False).double()
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    loader = anyrank.ElasticLoader(rows, global_batch=4, microbatch=1, shuffle=False)
    with meetings() as met:
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch).sum(), weight=16 * (batch.item() - 1))
    assert model.weight.grad is not None
    return model.weight.grad.item(), met.count("comparing weights")


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_whose_first_weight_is_0_agrees_once_on_its_divisor(world: int) -> None:
    for gradient, count in run_ranks(world, job_first_weight_is_nothing):
        assert gradient == pytest.approx((1 * 2 + 2 * 3 + 3 * 4) / 6, rel=1e-12)
        assert count == (world > 1)
