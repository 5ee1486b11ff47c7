"""`diff` of two runs sees all that they hold, and nothing that differs between equal runs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank


class Tracker:
    """A part whose state is any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def run(
    folder: Path,
    *,
    rate: float = 0.1,
    foreach: bool | None = None,
    period: int = 3,
    seed: int = 0,
    batch: int = 4,
    **parts: Any,
) -> str:
    """A run of one saved step."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=foreach)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, period)
    data = anyrank.ElasticLoader(torch.zeros(8, 2), global_batch=batch, microbatch=2, seed=seed)
    trackers: dict[str, Any] = {name: Tracker(value) for name, value in parts.items()}
    state = anyrank.TrainState(model, optimizer, scheduler=scheduler, data=data, **trackers)
    with anyrank.Checkpoints(folder, state) as ckpts:
        ckpts.save()
    return str(folder)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "option": ({}, {"rate": 9.0}, "number    optimizer.param_groups.0.lr: 0.1 and 9.0"),
    "scheduler": ({}, {"period": 300}, "number    scheduler.step_size: 3 and 300"),
    "seed": ({}, {"seed": 5}, "data      seed: 0 and 5"),
    "batch": ({}, {"batch": 8}, "data      global_batch: 4 and 8"),
    "part": ({}, {"best": {}}, ": best"),
    "long text": (
        {"note": {"text": "x" * 100 + "a"}},
        {"note": {"text": "x" * 100 + "b"}},
        "number    note.text: ...xxxxxxxxxxa and ...xxxxxxxxxxb",
    ),
    "JSON in a text": (
        {"note": {"json": json.dumps({"log": ["x" * 100], "state": {"loss": 0.5}})}},
        {"note": {"json": json.dumps({"log": ["x" * 100], "state": {"loss": 0.25}})}},
        "number    note.json.state.loss: 0.5 and 0.25",
    ),
    "text": ({"best": "x"}, {"best": "y"}, "number    best: x and y"),
    "nan": ({"best": [math.nan]}, {"best": [1.0]}, "number    best.0: nan and 1.0"),
    "lacks": ({"best": {"a": "absent"}}, {"best": {}}, "number    best.a: absent and absent"),
    "empty": ({"best": {"a": []}}, {"best": {}}, "number    best.a: [] and absent"),
    "key": ({"best": {1: 2}}, {"best": {"1": 2}}, "number    best: [[1, 2]] and absent"),
    "dtype": ({"best": [torch.int8]}, {"best": [torch.uint8]}, "best.0: int8 and uint8"),
    "tensor": ({"best": {"t": torch.ones(1)}}, {"best": {"t": 1}}, "a/step-00000000: best.t@00000"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_is_told_once_with_both_values(tmp_path: Path, kind: str) -> None:
    one, two, expected = DIFFERENT[kind]
    a, b = run(tmp_path / "a", **one), run(tmp_path / "b", **two)
    for found in (anyrank.diff(a, b), anyrank.diff(f"{a}/step-00000000", f"{b}/step-00000000")):
        assert not found
        assert expected in str(found)
        table = json.loads(found.to_json())
        told = [*table["only_a"], *table["only_b"], *table["data"], *table["numbers"]]
        assert len(told) == len({*told}) >= 1


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    """Another id and time, another way to compute; 1 is 1.0, and NaN is NaN."""
    value = {"n": 1, "f": math.nan, "t": (1, {2}), 3: None, "x": torch.zeros(2)}
    a = run(tmp_path / "a", foreach=True, best=value)
    b = run(tmp_path / "b", foreach=False, best={**value, "n": 1.0})
    found = anyrank.diff(a, b)
    assert found, found


def test_rank_counts_do_not_differ(tmp_path: Path) -> None:
    from anyrank.testing import run_ranks

    run(tmp_path / "one", best=0.5)
    run_ranks(2, run, tmp_path / "two", best=0.5)
    assert anyrank.diff(tmp_path / "one", tmp_path / "two")
    run_ranks(2, run, tmp_path / "other", best=0.7)
    found = anyrank.diff(tmp_path / "one", tmp_path / "other")
    assert found.numbers == {"best": (0.5, 0.7)}


def timed(folder: Path, *, weight: float = 1.0) -> str:
    """A run of two saved steps with a timer, which never shows the same."""
    model = nn.Linear(2, 2)
    timer = Tracker({"seconds": 0.0})
    state = anyrank.TrainState(model, timer=timer, best=Tracker([1, 2]))
    with anyrank.Checkpoints(folder, state) as ckpts:
        for step in (1, 2):
            nn.init.constant_(model.weight, weight if step == 2 else 1.0)
            nn.init.zeros_(model.bias)
            timer.value = {"seconds": time.perf_counter()}
            state.step = step
            ckpts.save()
    return str(folder)


def test_each_part_is_judged_at_the_newest_common_step(tmp_path: Path) -> None:
    a, b, c = (timed(tmp_path / name, weight=w) for name, w in zip("abc", (1, 1, 2), strict=True))
    found = anyrank.diff(a, b)
    assert not found
    assert (found.step, found.newest) == (1, 2)
    assert found.parts == {"model": True, "timer": False, "best": True}
    assert "newest common step (2), by part:" in str(found)
    assert anyrank.diff(a, c).parts == {"model": False, "timer": False, "best": True}
    for ignore in ("timer", ["timer.*"], ["t*r", "nothing"]):
        ignored = anyrank.diff(a, b, ignore=ignore)
        assert ignored, ignored
        assert ignored.parts["model"]
    ignored = anyrank.diff(a, c, ignore="timer")
    assert (ignored.step, [*ignored.values]) == (2, ["model.weight"])
    assert anyrank.diff(a, c, ignore=["timer", "*.weight"])
    with pytest.raises(
        TypeError, match="ignore=3: expected a pattern or a list of patterns, got int"
    ):
        anyrank.diff(a, c, ignore=3)  # type: ignore[arg-type]
