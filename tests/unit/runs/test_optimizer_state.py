"""Optimizers saved and resumed: every kind of state, no step, and groups by parameter name."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume, save
from torch import nn
from torch.optim import Optimizer

import anyrank

Make = Callable[[list[nn.Parameter]], Optimizer]


class Odd(Optimizer):
    """State of every kind: numbers, None, text, nested tables, tensors of other shapes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "name": "odd", "when": None})
        self.state["all"]["count"] = 7  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["scale"] = float("inf")
                state["seen"], state["nothing"], state["kind"] = True, None, "int8"
                state["codes"] = (parameter.detach().flatten() * 9).round().to(torch.int8)
                state["absmax"] = parameter.detach().abs().max().reshape(1, 1)
                state["inner"] = {"history": [1.5, (2, 3)], 4: parameter.detach().sum()}
                parameter.data.mul_(0.9)


def two_groups(kind: type[Optimizer], **options: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        half = len(parameters) // 2
        return kind(
            [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.5}], **options
        )

    return make


OPTIMIZERS: dict[str, Make] = {
    "adamw": two_groups(torch.optim.AdamW, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9)),
    "adamw foreach amsgrad": two_groups(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": two_groups(torch.optim.AdamW, lr=0.1, fused=True),
    "adam tensor lr": two_groups(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "sgd": two_groups(torch.optim.SGD, lr=0.1),
    "sgd momentum": two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.1),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.1),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "nadam": two_groups(torch.optim.NAdam, lr=0.1),
    "asgd": two_groups(torch.optim.ASGD, lr=0.1),
    "odd": two_groups(Odd),
}


def net(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 6))
    model[2].bias.requires_grad_(not frozen)
    return model


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one: Any, other: Any, where: str = "") -> None:
    """Equal in value and type, at any depth."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=where)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}.{number}")
    else:
        assert one == other, where


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, name: str, steps: int
) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    state = anyrank.TrainState(model, optimizer)
    for number in range(steps):
        step(model, optimizer, number)
    before = optimizer.state_dict()
    save(tmp_path, state)
    same(optimizer.state_dict(), before)  # saving moves nothing

    torch.manual_seed(9)
    fresh = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 6))
    other = OPTIMIZERS[name](list(fresh.parameters()))
    if steps == 1:
        step(fresh, other, 5)  # state that the resume has to replace, or remove
    report = resume(tmp_path, anyrank.TrainState(fresh, other))
    assert report is not None
    assert report.components["optimizer"] == "exact"
    same(other.state_dict(), optimizer.state_dict())
    for number in range(3):
        step(model, optimizer, 10 + number)
        step(fresh, other, 10 + number)
    same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_partly_initialized_state_stays_partly_initialized(tmp_path: Path) -> None:
    model = net(frozen=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    assert len(optimizer.state) == 7
    save(tmp_path, anyrank.TrainState(model, optimizer))
    fresh = net(frozen=True)
    other = torch.optim.AdamW(fresh.parameters())
    resume(tmp_path, anyrank.TrainState(fresh, other))
    assert len(other.state) == 7
    same(other.state_dict(), optimizer.state_dict())


def save_adam(path: Path, groups: Callable[[list[nn.Parameter]], Any]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(groups(list(model.parameters())), lr=0.1)
    step(model, optimizer, 0)
    save(path, anyrank.TrainState(model, optimizer))


def test_regrouped_parameters_keep_their_state_and_hyperparameters(tmp_path: Path) -> None:
    save_adam(tmp_path, lambda p: [{"params": p[:4]}, {"params": p[4:]}])
    model = net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[5:]}, {"params": parameters[:5]}], lr=9.0)
    resume(tmp_path, anyrank.TrainState(model, optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert set(optimizer.state) == set(parameters)


MISFITS = {
    "joined": (lambda p: [{"params": p}], "whose hyperparameters differ"),
    "fewer": (lambda p: [{"params": p[:4]}, {"params": p[4:-1], "lr": 1.0}], "no longer holds"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_groups_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    groups, match = MISFITS[case]
    save_adam(tmp_path, lambda p: [{"params": p[:4]}, {"params": p[4:], "lr": 1.0}])
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = anyrank.TrainState(model, torch.optim.AdamW(groups(list(model.parameters())), lr=0.1))
    with pytest.raises(anyrank.CheckpointError, match=match):
        resume(tmp_path, state)
    same(dict(model.state_dict()), before)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    save_adam(tmp_path, lambda p: [{"params": p}])
    model = net()
    state = anyrank.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        anyrank.CheckpointError, match=r"is a SGD, but the checkpoint was saved with a AdamW"
    ):
        resume(tmp_path, state)


def test_a_parameter_of_no_module_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = net()
    stray = nn.Parameter(torch.zeros(2))
    state = anyrank.TrainState(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(anyrank.CheckpointError, match=r"parameter 8 of group 0.*no module"):
        save(tmp_path, state)


def test_a_value_that_json_cannot_carry_is_refused_at_the_save(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = net
    with pytest.raises(
        anyrank.CheckpointError, match=r"optimizer.param_groups.0.rule: a .*function"
    ):
        save(tmp_path, anyrank.TrainState(model, optimizer))
    assert not list(tmp_path.glob("step-*"))


class OtherSchedule:
    """A schedule of another library, whose lists nobody else knows."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]


def in_groups(cuts: list[list[int]], kind: str) -> anyrank.TrainState:
    """Each parameter is trained at the rate that its number says, 2 and 3 at the same."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    every = [*model.parameters()]
    groups = [{"params": [every[n] for n in cut], "lr": 1 + cut[0] // 2} for cut in cuts]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    schedulers: dict[str, Any] = {
        "step": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "sequence": torch.optim.lr_scheduler.SequentialLR(
            optimizer, [warm, torch.optim.lr_scheduler.StepLR(optimizer, 2)], milestones=[1]
        ),
        "other": OtherSchedule(optimizer),
    }
    for parameter in every:
        parameter.grad = torch.ones_like(parameter)
    return anyrank.TrainState(model, optimizer, scheduler=schedulers[kind])


CUTS = {"swapped": [[2, 3], [0, 1]], "split": [[0, 1], [2], [3]], "alone": [[2, 3]]}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["step", "sequence"])
def test_a_scheduler_goes_by_the_parameters_of_its_groups(
    tmp_path: Path, cut: str, kind: str
) -> None:
    def rates(state: anyrank.TrainState, steps: int) -> list[dict[int, float]]:
        optimizer: Any = state.parts.by_name["optimizer"]
        schedule: Any = state.parts.by_name["scheduler"]
        model: Any = state.parts.by_name["model"]
        numbers = {id(parameter): n for n, parameter in enumerate(model.parameters())}
        rows: list[dict[int, float]] = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            groups = optimizer.param_groups
            rows.append({numbers[id(p)]: group["lr"] for group in groups for p in group["params"]})
        return rows

    whole = in_groups([[0, 1], [2, 3]], kind)
    expected = rates(whole, 6)
    state = in_groups([[0, 1], [2, 3]], kind)
    rates(state, 3)
    save(tmp_path, state)
    state = in_groups(CUTS[cut], kind)
    if cut == "alone":
        with pytest.raises(anyrank.CheckpointError, match=r"drop=\['0.weight'\].*skip="):
            resume(tmp_path, in_groups(CUTS[cut], kind))
    report = resume(tmp_path, state, drop=["0.*"] if cut == "alone" else [])
    assert report is not None
    assert report.components["scheduler"] == "exact"
    dropped = "dropped by drop=: 0.weight, 0.bias" if cut == "alone" else ""
    assert report.components["optimizer"].reason == dropped
    for now, before in zip(rates(state, 3), expected[3:], strict=True):
        assert now == pytest.approx({n: before[n] for n in now})
    optimizer: Any = state.parts.by_name["optimizer"]
    was: Any = whole.parts.by_name["optimizer"]
    *_, momentum = (state["momentum_buffer"] for state in optimizer.state.values())
    *_, before = (state["momentum_buffer"] for state in was.state.values())
    assert torch.equal(momentum, before)  # all gradients are ones


def test_a_scheduler_of_another_library_is_refused_for_other_groups(tmp_path: Path) -> None:
    save(tmp_path, in_groups([[0, 1], [2, 3]], "other"))
    resume(tmp_path, in_groups([[0, 1], [2, 3]], "other"))
    text = r"scheduler: depends on the order of optimizer's groups.*skip=\['scheduler'\]"
    with pytest.raises(anyrank.CheckpointError, match=text):
        resume(tmp_path, in_groups(CUTS["swapped"], "other"))
    report = resume(tmp_path, in_groups(CUTS["swapped"], "other"), skip=["scheduler"])
    assert report is not None
    assert report.components["optimizer"] == "exact"


def test_a_model_may_drop_what_it_no_longer_has(tmp_path: Path) -> None:
    """A head that was taken off, under any optimizer."""

    def build(parts: int) -> anyrank.TrainState:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(parts)])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return anyrank.TrainState(model, optimizer)

    saved = build(3)
    save(tmp_path, saved)
    with pytest.raises(anyrank.CheckpointError, match=r"not in the model.*drop=\['2.weight'\]"):
        resume(tmp_path, build(2))
    state = build(2)
    report = resume(tmp_path, state, drop=["2.*"])
    assert report is not None
    for part in ("model", "optimizer"):
        outcome = report.components[part]
        assert (outcome, outcome.reason) == ("derived", "dropped by drop=: 2.weight, 2.bias")
    model, before = (one.parts.by_name["model"] for one in (state, saved))
    assert all(
        torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items()
    )
    report = resume(tmp_path, state, drop=["2.*", "gone.*"])  # a job that restarts says it again
    assert report is not None


def calls_of_a_resume(path: Path, count: int) -> int:
    """Function calls of a resume of so many parameters."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0)}
    state = anyrank.TrainState(model, optimizer)
    save(path, state)
    profile = cProfile.Profile()
    profile.runcall(resume, path, state)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def test_a_resume_takes_time_in_proportion_to_the_parameters(tmp_path: Path) -> None:
    # The group of each step count was looked for among all parameters.
    few, many = (calls_of_a_resume(tmp_path / str(n), n) for n in (200, 800))
    assert many < 4.4 * few, (few, many)
