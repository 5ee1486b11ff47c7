"""Optimizers with more than torch's own state: resumed by their own methods, or named."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume, save
from torch import nn

import anyrank


class Lookahead(torch.optim.Optimizer):
    """Slow weights and an inner optimizer in attributes, and a state_dict() of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.count = base, 0
        self.members = [p for group in base.param_groups for p in group["params"]]
        super().__init__(self.members, {"lr": 0.0})
        self.slow = [p.detach().clone() for p in self.members]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.members, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "count": self.count, "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.count = state_dict["count"]
        self.slow = [one.clone() for one in state_dict["slow"]]


class Forgetful(Lookahead):
    """Its state_dict() leaves the slow weights out."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"slow": self.slow})


class Silent(Lookahead):
    """It has torch's state_dict(), which knows nothing of its attributes."""

    def state_dict(self) -> dict[str, Any]:
        return torch.optim.Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.optim.Optimizer.load_state_dict(self, state_dict)


class Linked(torch.optim.AdamW):
    """A step counts only where load_state_dict() has set up what it needs."""

    loaded = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loaded += 1


def hooked(net: nn.Module) -> torch.optim.Optimizer:
    """A hook keeps a counter beside the state."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    extra: Any = optimizer

    def put(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"count": getattr(extra, "count", 0)}

    def take(_: Any, state: dict[str, Any]) -> None:
        extra.count = state["count"]

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def look(kind: type[Lookahead]) -> Any:
    return lambda net: kind(torch.optim.AdamW(net.parameters(), lr=0.1))


def step(net: nn.Module, optimizer: Any) -> None:
    net(torch.linspace(0, 1, 8).view(2, 4)).square().mean().backward()
    optimizer.step()
    net.zero_grad()
    if hasattr(optimizer, "count") and not isinstance(optimizer, Lookahead):
        optimizer.count += 1


def run_of(make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    return net, make(net)


@pytest.mark.parametrize("make", [look(Lookahead), hooked])
def test_what_an_optimizer_keeps_beside_its_state_comes_back(tmp_path: Path, make: Any) -> None:
    net, optimizer = run_of(make)
    optimizer.count = 0
    for _ in range(3):
        step(net, optimizer)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    other, resumed = run_of(make)
    report = resume(tmp_path, anyrank.TrainState(other, resumed))
    assert report is not None
    assert report.components["optimizer"] == "exact"
    assert resumed.count == 3
    for _ in range(3):
        step(net, optimizer)
        step(other, resumed)
    assert torch.equal(net.weight, other.weight)  # type: ignore[arg-type]


class Sharing(torch.optim.Optimizer):
    """The inner optimizer's state and groups are its own too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Stale(Lookahead):
    """Its load_state_dict() keeps the slow weights of the constructor."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"slow": self.slow})


def test_state_that_an_inner_optimizer_shares_comes_back(tmp_path: Path) -> None:
    def make(net: nn.Module) -> Sharing:
        return Sharing(net.parameters())

    net, optimizer = run_of(make)
    for _ in range(2):
        step(net, optimizer)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    other, resumed = run_of(make)
    report = resume(tmp_path, anyrank.TrainState(other, resumed))
    assert report is not None
    assert (report.components["optimizer"], report.notes) == ("exact", [])
    for _ in range(3):
        step(net, optimizer)
        step(other, resumed)
    assert torch.equal(net.weight, other.weight)  # type: ignore[arg-type]


def test_what_load_state_dict_leaves_out_is_not_exact(tmp_path: Path) -> None:
    net, optimizer = run_of(look(Stale))
    for _ in range(2):
        step(net, optimizer)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    report = resume(tmp_path, anyrank.TrainState(*run_of(look(Stale))))
    assert report is not None
    outcome = report.components["optimizer"]
    assert outcome == "derived"
    assert "load_state_dict() of a Stale did not restore: optimizer.slow.0" in outcome.reason


def scratch(net: nn.Module) -> Any:
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.slow = deque([{"a": torch.rand(3)}])
    return optimizer


@pytest.mark.parametrize("make", [look(Forgetful), look(Silent), scratch])
def test_attributes_that_a_state_dict_leaves_out_are_named(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = run_of(make)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(net, optimizer)) as ckpts:
        assert ckpts.resume() is None
        kind = type(optimizer).__name__
        assert (
            f"slow of a {kind} hold tensors that its state_dict() does not include" in caplog.text
        )
        step(net, optimizer)
        ckpts.save()
    warnings = [one for one in caplog.records if "does not include" in one.getMessage()]
    assert len(warnings) == 1
    report = resume(tmp_path, anyrank.TrainState(*run_of(make)))
    assert report is not None
    assert report.components["optimizer"] == "exact"
    (note,) = (note for note in report.notes if "does not include" in note)
    assert note.startswith("optimizer: ")
    assert "slow" in note


class Box:
    """A plain object."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def test_what_other_parts_save_is_no_state_of_the_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.model, optimizer.me, optimizer.ema = net, optimizer, Box(average)
    optimizer.scaler, optimizer.log = torch.amp.GradScaler("cpu"), logging.getLogger("x")
    optimizer.loss, optimizer.limit = nn.CrossEntropyLoss(weight=torch.ones(4)), float("nan")
    optimizer.lazy, optimizer.own = nn.LazyLinear(1), weakref.ref(net)
    optimizer.cached = [*net.parameters()]
    state = anyrank.TrainState(net, optimizer, ema=average)
    step(net, optimizer)
    optimizer.moments = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    average.update_parameters(net)
    save(tmp_path, state)
    report = resume(tmp_path, state)
    assert report is not None
    assert report.components["optimizer"] == "exact"
    assert "does not include" not in caplog.text


def test_torchs_own_caches_are_no_state(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(net.parameters())
    state = anyrank.TrainState(net, optimizer)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = net(torch.ones(2, 4)).square().mean()
        total.backward()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    save(tmp_path, state)
    report = resume(tmp_path, state)
    assert report is not None
    assert report.components["optimizer"] == "exact"


def lbfgs(net: Any, parameters: Any = None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters or net.parameters(), lr=0.1, max_iter=2)


def lbfgs_step(net: nn.Module, optimizer: torch.optim.LBFGS) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = net(torch.linspace(-1, 1, 8).reshape(2, 4)).square().mean()
        total.backward()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]


def test_a_history_over_all_parameters_is_for_these_in_this_order(tmp_path: Path) -> None:
    """LBFGS keeps one vector over all parameters: in another order it is another vector."""
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = lbfgs(net)
    lbfgs_step(net, optimizer)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    lbfgs_step(net, optimizer)
    others: dict[str, Any] = {
        "another order": lambda net: [*net[1].parameters(), *net[0].parameters()],
        "fewer": lambda net: [*net[0].parameters()],
    }
    for what, choose in others.items():
        again: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = again[0].weight.detach().clone()
        state = anyrank.TrainState(again, lbfgs(again, choose(again)))
        with pytest.raises(
            anyrank.CheckpointError, match=r"in their order, which was .* skip=\['optimizer'\]"
        ):
            resume(tmp_path, state, drop=["1.*"] if what == "fewer" else [])
        assert torch.equal(again[0].weight, before)
        assert resume(tmp_path, state, skip=["optimizer"]) is not None
    same: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    history = lbfgs(same)
    resume(tmp_path, anyrank.TrainState(same, history))
    lbfgs_step(same, history)
    assert torch.equal(same[0].weight, net[0].weight)


def test_a_history_over_all_parameters_comes_from_a_scripts_file(tmp_path: Path) -> None:
    net: Any = nn.Linear(4, 4)
    optimizer = lbfgs(net)
    lbfgs_step(net, optimizer)
    tables = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(tables, tmp_path / "a.pt")
    lbfgs_step(net, optimizer)
    again: Any = nn.Linear(4, 4)
    history = lbfgs(again)
    state = anyrank.TrainState(again, history)
    with anyrank.Checkpoints(tmp_path / "run", state) as ckpts:
        report = ckpts.resume(tmp_path / "a.pt")
    assert report is not None
    assert report.components["optimizer"] == "exact"
    lbfgs_step(again, history)
    assert torch.equal(again.weight, net.weight)


def test_a_load_state_dict_of_its_own_is_called_and_casts_nothing(tmp_path: Path) -> None:
    def make(net: nn.Module) -> Any:
        optimizer = Linked(net.bfloat16().parameters(), lr=0.1)
        for parameter in net.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.full(parameter.shape, 1 / 3),
                "exp_avg_sq": torch.full(parameter.shape, 1 / 3),
            }
        return optimizer

    net, optimizer = run_of(make)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    other, resumed = run_of(make)
    resume(tmp_path, anyrank.TrainState(other, resumed))
    assert resumed.loaded == 1
    assert {one["exp_avg"].dtype for one in resumed.state.values()} == {torch.float32}


@pytest.mark.parametrize("make", [look(Lookahead), hooked])
def test_a_state_dict_of_its_own_is_for_the_parameters_in_their_order(
    tmp_path: Path, make: Any
) -> None:
    """It numbers the parameters: in another order each would get the state of another."""
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(net)
    step(net, optimizer)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    again: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = again[0].weight.detach().clone()
    swapped = make(nn.Sequential(again[1], again[0]))
    state = anyrank.TrainState(again, swapped)
    expected = r"in their order, which was 0.weight .* and is 1.weight .* skip=\['optimizer'\]"
    with pytest.raises(anyrank.CheckpointError, match=expected):
        resume(tmp_path, state)
    assert torch.equal(again[0].weight, before)
    assert resume(tmp_path, state, skip=["optimizer"]) is not None


def test_an_optimizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    net, optimizer = run_of(look(Lookahead))
    save(tmp_path, anyrank.TrainState(net, optimizer))
    plain = torch.optim.AdamW(net.parameters())
    with pytest.raises(
        anyrank.CheckpointError, match="is a AdamW, but the checkpoint was saved with a Lookahead"
    ):
        resume(tmp_path, anyrank.TrainState(net, plain))


def plain(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        (hooked, plain, "in the saved run, but not in this script"),
        (plain, hooked, "in this script, but not in the saved run"),
    ],
)
def test_hooks_of_only_one_side_are_named(
    tmp_path: Path, first: Any, second: Any, where: str
) -> None:
    """Both are an AdamW, so their class says nothing."""
    net, optimizer = run_of(first)
    save(tmp_path, anyrank.TrainState(net, optimizer))
    state = anyrank.TrainState(*run_of(second))
    with pytest.raises(anyrank.CheckpointError, match=f"AdamW overrides .* {where}, .*skip="):
        resume(tmp_path, state)
    assert resume(tmp_path, state, skip=["optimizer"]) is not None


class Codes(torch.Tensor):
    """A wrapper class by torch's protocol, as 8-bit optimizers keep their state in."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Codes)])
def test_state_in_tensors_of_another_kind_is_refused_by_its_key(
    tmp_path: Path, value: torch.Tensor
) -> None:
    net, optimizer = run_of(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer.state[net.weight]["codes"] = value
    with pytest.raises(anyrank.CheckpointError, match=r"optimizer\.state\.weight\.codes: a .* sav"):
        save(tmp_path, anyrank.TrainState(net, optimizer))
