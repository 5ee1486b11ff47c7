"""Promise 9: the same code on 1 and on N ranks: the same values, whatever the number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integrations.families import build
from tests.ranks.sharded_nets import LAYOUTS, Net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


class Custom(nn.Module):
    """A module whose rule fills a parameter, an integer buffer and a derived one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.steps.fill_(3)
            self.table.copy_(torch.arange(3.0))


class Zoo(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.empty
        self.custom = Custom()
        self.conv = nn.Conv1d(4, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.rnn = nn.LSTM(3, 5)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors.items()
    }


def job_scratch(kind: str) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(3 + 10 * torch.distributed.get_rank())  # the first rank's seed counts
    with torch.device("meta"):
        model: Any = Zoo() if kind == "zoo" else build(kind)
    if kind == "zoo":
        for child in (model.blocks[0], model.custom, model.rnn):
            fully_shard(child)
    fully_shard(model)
    # Zoo's blocks hold tables that no rule fills: they stay the business of `meta()`.
    if kind == "zoo":
        for block in model.blocks:
            block.count, block.table = torch.arange(3.0), torch.linspace(0, 1, 8)
            block.steps = torch.tensor(2.0)
    report = anyrank.materialize(model)
    return whole(model), report


@pytest.mark.parametrize("kind", ["zoo", "llama_tied", "mixtral", "llava"])
def test_from_scratch_on_any_number_of_ranks(kind: str) -> None:
    runs = [run_ranks(world, job_scratch, kind) for world in (1, 2, 3)]
    expected, report = runs[0][0]
    assert report.initialised
    for results in runs:
        for values, _ in results:
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(values[name], value), name
    if kind != "zoo":
        torch.manual_seed(0)
        plain = build(kind)
        for name, value in plain.named_parameters():
            if value.numel() > 500:
                spread = float(expected[name].double().std())
                plainly = float(value.detach().double().std())
                assert spread == pytest.approx(plainly, rel=0.15), name


def job_missing(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3 + torch.distributed.get_rank())
    with anyrank.meta():
        net = Net()
    net = LAYOUTS[layout](net)
    given = {f"blocks.0.{k}": v for k, v in Net().blocks[0].state_dict().items()}
    torch.manual_seed(9)
    given = {k: torch.randn(v.shape) for k, v in given.items()}
    given |= {
        "scale": torch.ones(1, 8),
        "empty": torch.empty(0, 8),
        "blocks.1.count": torch.ones(3),
        "blocks.1.steps": torch.tensor(1.0),
    }
    report = anyrank.load(net, given, missing="init")
    assert "blocks.1.up.weight" in report.initialised
    assert report.tied
    return whole(net)


def test_missing_tensors_get_the_same_first_values_in_any_layout() -> None:
    expected = run_ranks(1, job_missing, "plain")[0]
    for world, layout in ((2, "plain"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp")):
        for values in run_ranks(world, job_missing, layout):
            for name, value in expected.items():
                assert torch.equal(values[name], value), (world, layout, name)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))


def test_a_tensor_without_a_rule_raises_and_nothing_changes() -> None:
    with anyrank.meta():
        model = nn.Sequential(nn.Linear(2, 2), Silent())
    with pytest.raises(anyrank.LoadError, match=r"no rule gives initial values to 1.weight"):
        anyrank.materialize(model)
    assert all(p.is_meta for p in model.parameters())


def job_without_a_rule() -> list[str]:
    """Fill FSDP2 and DDP models that have a tensor without a rule, beside real weights."""
    said: list[str] = []
    source = nn.Linear(2, 2).state_dict()
    source = {f"0.{name}": tensor for name, tensor in source.items()}
    for wrap in (fully_shard, DistributedDataParallel):
        for call in (anyrank.plan, anyrank.load, anyrank.sync):
            net = nn.Sequential(nn.Linear(2, 2), Silent())
            nn.init.ones_(net[1].get_parameter("weight"))
            model: Any = wrap(net)
            before = whole(model)
            with pytest.raises(anyrank.LoadError) as caught:
                call(model, source, missing="init")
            said.append(str(caught.value))
            assert all(torch.equal(before[name], t) for name, t in whole(model).items())
    return said


def test_a_tensor_without_a_rule_is_refused_by_all_ranks_before_weights_change() -> None:
    for said in run_ranks(2, job_without_a_rule):
        assert all("no rule gives initial values to 1.weight" in text for text in said)


def twos(module: Any) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 2.0)


def test_a_rule_of_the_users_own() -> None:
    with anyrank.meta():
        model = nn.Sequential(nn.Linear(2, 2), Silent())
    report = anyrank.materialize(model, init=twos)
    assert report.initialised == {"0.weight": "twos", "0.bias": "twos", "1.weight": "twos"}
    assert all(bool((p == 2).all()) for p in model.parameters())


def test_an_exception_of_the_users_rule_is_passed_on() -> None:
    with anyrank.meta():
        model = Silent()
    with pytest.raises(ZeroDivisionError):
        anyrank.materialize(model, init=lambda module: 1 / 0)
