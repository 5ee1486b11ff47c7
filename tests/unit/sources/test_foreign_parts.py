"""Parts that a checkpoint keeps under its own names: found, or named with the `parts=` for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anyrank


class Tracker:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def made() -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, CosineAnnealingLR(optimizer, 20)


def trained(steps: int = 6) -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR]:
    model, optimizer, schedule = made()
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


MODEL, OPTIMIZER, SCHEDULE = trained()
TABLES = [part.state_dict() for part in (MODEL, OPTIMIZER, SCHEDULE)]
WEIGHTS, MOMENTS, COUNTS = TABLES
AVERAGE = {key: value + 1 for key, value in WEIGHTS.items()}


def file_of(folder: Path, **tables: Any) -> Path:
    torch.save(tables, folder / "a.pth")
    return folder / "a.pth"


def begin(path: Path, at: str = "run", **options: Any) -> tuple[Any, ...]:
    model, optimizer, schedule = made()
    more = options.pop("more", {})
    state = anyrank.TrainState(model, optimizer, scheduler=schedule, **more)
    with anyrank.Checkpoints(path.parent / at, state) as ckpts:
        report = ckpts.resume(path, **options)
    assert report is not None
    return model, optimizer, schedule, report


def advice_in(text: str) -> dict[str, str]:
    match = re.search(r"parts=\{'(\w+)': '([^']+)'\}", text)
    assert match is not None, text
    return {match[1]: match[2]}


@pytest.mark.parametrize("name", ["schedulers", "lr_schedulers", "lr_sched", "sched"])
@pytest.mark.parametrize("in_list", [True, False])
def test_a_schedule_is_found_by_usual_names_and_in_lists(
    name: str, in_list: bool, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {name: [COUNTS] if in_list else COUNTS, "optimizers": [MOMENTS]}
    _, optimizer, schedule, report = begin(file_of(tmp_path, model=WEIGHTS, iter=6, **tables))
    assert schedule.last_epoch == 6
    assert report.components["scheduler"] == "exact"
    assert optimizer.param_groups[0]["lr"] == OPTIMIZER.param_groups[0]["lr"]


@pytest.mark.parametrize("value", [COUNTS, [COUNTS], {"main": COUNTS}])
def test_a_schedule_of_another_name_is_named_with_parts(value: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, model=WEIGHTS, optimizer=MOMENTS, annealing_sched=value, step=6)
    _, optimizer, schedule, report = begin(path)
    reason = report.components["scheduler"].reason
    assert "does not have it" not in reason
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1  # the new schedule's first rate
    if value != {"main": COUNTS}:
        _, _, schedule, report = begin(path, "second", parts=advice_in(reason))
    else:
        _, _, schedule, report = begin(path, "second", parts={"scheduler": "annealing_sched.main"})
    assert schedule.last_epoch == 6


def test_a_schedule_that_is_in_no_entry_begins_with_the_scripts_rate(tmp_path: Path) -> None:
    path = file_of(tmp_path, model=WEIGHTS, optimizer=MOMENTS, step=6)
    _, optimizer, _, report = begin(path)
    assert (
        report.components["scheduler"].reason
        == "the checkpoint of a training script does not have it"
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert any("which is not restored; it was" in note for note in report.notes)


def test_parts_inside_of_tables_are_named_with_dots(tmp_path: Path) -> None:
    nested = {
        "net": {"weights": WEIGHTS, "ema": AVERAGE},
        "opt": {"adam": MOMENTS},
        "sched": [COUNTS],
    }
    path = file_of(tmp_path, checkpoint=nested)
    with pytest.raises(
        anyrank.CheckpointError, match="which table holds the model's weights"
    ) as raised:
        begin(path)
    parts = advice_in(str(raised.value))
    assert parts == {"model": "checkpoint.net.weights"}
    parts |= {"optimizer": "checkpoint.opt.adam", "scheduler": "checkpoint.sched.0"}
    parts["ema"] = "checkpoint.net.ema"
    average = nn.Linear(3, 2)
    model, _, schedule, report = begin(path, parts=parts, more={"ema": average})
    assert torch.equal(model.weight, WEIGHTS["weight"])
    assert torch.equal(average.weight, AVERAGE["weight"])
    assert schedule.last_epoch == 6
    assert {report.components[part] for part in parts} == {"exact"}


def test_the_advice_for_weights_beside_their_average_works(tmp_path: Path) -> None:
    path = file_of(tmp_path, network={"params_ema": AVERAGE, "params": WEIGHTS}, step=6)
    with pytest.raises(anyrank.CheckpointError) as raised:
        begin(path)
    model, *_ = begin(path, parts=advice_in(str(raised.value)))
    assert torch.equal(model.weight, WEIGHTS["weight"])


def test_optimizers_of_other_names_are_named(tmp_path: Path) -> None:
    path = file_of(tmp_path, model=WEIGHTS, adam_g=MOMENTS, step=6)
    *_, report = begin(path)
    _, optimizer, _, report = begin(
        path, "second", parts=advice_in(report.components["optimizer"].reason)
    )
    assert report.components["optimizer"] == "exact"
    assert optimizer.state_dict()["state"].keys() == MOMENTS["state"].keys()


def test_parts_that_name_another_kind_are_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, model=WEIGHTS, optimizer=MOMENTS, scheduler=COUNTS)
    with pytest.raises(anyrank.CheckpointError, match="ema: what parts= names for it"):
        begin(path, parts={"ema": "scheduler"}, more={"ema": nn.Linear(3, 2)})


def test_what_accelerate_registered_goes_to_the_parts_in_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "step_6"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    torch.save(MOMENTS, folder / "optimizer.bin")
    for number in range(11):
        custom = AVERAGE if number == 1 else {"value": number}
        torch.save(custom, folder / f"custom_checkpoint_{number}.pkl")
    torch.save({"step": 6}, folder / "random_states_0.pkl")
    average, parts = nn.Linear(3, 2), dict[str, Any]()
    parts = {"registered": Tracker(-1), "registered_1": average, "registered_10": Tracker(-1)}
    *_, report = begin(folder, more=parts)
    assert (parts["registered"].value, parts["registered_10"].value) == (0, 10)
    assert torch.equal(average.weight, AVERAGE["weight"])
    assert {report.components[part] for part in parts} == {"exact"}
    *_, report = begin(folder, "second", more={"ema": nn.Linear(3, 2)})
    advice = advice_in(report.components["ema"].reason)
    assert advice == {"ema": "custom_checkpoint_1"}
    other = nn.Linear(3, 2)
    begin(folder, "third", more={"ema": other}, parts=advice)
    assert torch.equal(other.weight, AVERAGE["weight"])


def test_an_average_that_no_file_has_is_said_to_hold_the_scripts_values(tmp_path: Path) -> None:
    path, average = file_of(tmp_path, model=WEIGHTS, step=6), nn.Linear(3, 2)
    model, *_, report = begin(path, more={"ema": average})
    assert "it has the script's initial values" in report.components["ema"].reason
    if report.components["ema"] == "fresh":  # as the pages write it
        average.load_state_dict(model.state_dict())
    assert torch.equal(average.weight, WEIGHTS["weight"])
    *_, report = begin(path, "second", more={"ema": nn.Linear(2, 2)})  # another network is none
    assert "initial values" not in report.components["ema"].reason
