"""Another tool's checkpoint: which part is which, its counts and its epochs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank


def net_of(value: float) -> nn.Module:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    return net


def values_of(*nets: nn.Module) -> list[float]:
    return [net.get_parameter("weight")[0, 0].item() for net in nets]


def file_of(path: Path, **table: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    tables = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in table.items()}
    torch.save(tables, path)
    return path


def begin(path: Path, source: Path, state: anyrank.TrainState, **options: Any) -> Any:
    with anyrank.Checkpoints(path, state) as ckpts:
        return ckpts.resume(source, **options)


@pytest.mark.parametrize("name", ["model_ema", "ema", "state_dict_ema", "ema_model"])
def test_a_part_gets_the_table_of_its_own_name(name: str, tmp_path: Path) -> None:
    source = file_of(tmp_path / "a.pth", model=net_of(1), **{name: net_of(2)})
    for part in {name, "ema"}:
        model, average = net_of(0), net_of(0)
        named: dict[str, Any] = {part: average}
        report = begin(tmp_path / part, source, anyrank.TrainState(model, **named))
        assert values_of(model, average) == [1, 2]
        assert report.components[part] == "exact"
        said = f"read under other names: ema from {name}"
        assert (said in report.notes) is (part != name)


def test_the_name_of_two_tables_is_the_users(tmp_path: Path) -> None:
    source = file_of(tmp_path / "a.pth", model=net_of(1), model_ema=net_of(2), ema=net_of(3))
    model, first, second = net_of(0), net_of(0), net_of(0)
    begin(tmp_path / "run", source, anyrank.TrainState(model, model_ema=first, ema=second))
    assert values_of(model, first, second) == [1, 2, 3]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"mean": "state_dict_ema"}, [1, 2]),
        ({"mean": "average"}, [1, 3]),
        ({"model": "state_dict_ema", "mean": "average"}, [2, 3]),
    ],
)
def test_parts_names_the_table(
    parts: Mapping[str, str], expected: list[float], tmp_path: Path
) -> None:
    tables = {"state_dict": net_of(1), "state_dict_ema": net_of(2), "average": net_of(3)}
    source = file_of(tmp_path / "a.pth", **tables)
    model, mean = net_of(0), net_of(0)
    state = anyrank.TrainState(model, mean=mean)
    with pytest.raises(
        anyrank.CheckpointError,
        match=r"parts=\{'mean': 'nothing'\}: the checkpoint has no such part.*average",
    ):
        begin(tmp_path / "run", source, state, parts={"mean": "nothing"})
    report = begin(tmp_path / "run", source, state, parts=parts)
    assert values_of(model, mean) == expected
    assert any(note.startswith("read under other names: ") for note in report.notes)


def test_the_only_module_without_a_table_is_filled_from_the_average_that_fits(
    tmp_path: Path,
) -> None:
    source = file_of(tmp_path / "a.pth", model=net_of(1), state_dict_ema=net_of(2))
    average = net_of(0)
    report = begin(tmp_path / "a", source, anyrank.TrainState(net_of(0), registered=average))
    assert values_of(average) == [2]
    assert "read under other names: registered from state_dict_ema" in report.notes
    other = nn.Linear(3, 3)  # another network is none
    report = begin(tmp_path / "b", source, anyrank.TrainState(net_of(0), registered=other))
    assert report.components["registered"] == "fresh"


def counted(steps: int, times: int) -> dict[str, Any]:
    model = net_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 20))
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for _ in range(times):
            schedule.step()
    return {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}


def state_of_schedule() -> anyrank.TrainState:
    model = net_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 20))
    return anyrank.TrainState(model, optimizer, scheduler=schedule)


@pytest.mark.parametrize(
    ("times", "step", "words"),
    [
        (1, 6, ""),
        (3, 6, "the scheduler has stepped 18 times at optimizer step 6 (3 times as many)"),
        (0, 6, ""),  # of epochs
        (4, 24, "the checkpoint says step 24, but its optimizer has stepped 6 times"),
        (1, 2, "the checkpoint says step 2, but its optimizer has stepped 6 times"),
    ],
)
def test_a_count_that_is_none_of_steps_is_warned_of(
    times: int, step: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = file_of(tmp_path / "a.pth", **counted(6, times), step=step)
    with caplog.at_level(logging.WARNING, "anyrank.resume"):
        report = begin(tmp_path / "run", source, state_of_schedule())
    doubts = [note for note in report.notes if "step" in note and "count" in note]
    doubts = [note for note in doubts if "adopted" not in note]
    assert bool(doubts) is bool(words)
    if words:
        assert words in doubts[0]
        assert doubts[0] in caplog.messages


def test_a_file_without_a_step_is_at_the_step_of_its_optimizer(tmp_path: Path) -> None:
    """torchvision's references save epochs alone."""
    source = file_of(tmp_path / "a.pth", **counted(6, 1), epoch=1)
    report = begin(tmp_path / "run", source, state_of_schedule())
    assert report.step == 6
    assert (
        f"step 6 was taken from the optimizer's count, because {source} does not store it"
        in report.notes
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "the checkpoint does not say its step"),
        ({"step": 0}, "the checkpoint says step 0"),
        ({"step": "3"}, "the checkpoint's step is '3', which is not a step"),
    ],
)
def test_a_run_that_counts_from_0_though_its_optimizer_has_stepped_is_warned_of(
    table: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net_of(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # keeps no count
    model.get_parameter("weight").sum().backward()
    sgd.step()
    source = file_of(tmp_path / "a.pth", model=model, optimizer=sgd, **table)
    now = net_of(0)
    state = anyrank.TrainState(now, torch.optim.SGD(now.parameters(), lr=0.1, momentum=0.9))
    with caplog.at_level(logging.WARNING, "anyrank.resume"):
        report = begin(tmp_path / "run", source, state)
    said = f"{words}, so the run counts from 0, although its optimizer has stepped. Set state.step"
    assert [note.partition(" after")[0] for note in report.notes if words in note] == [said]
    assert any(text.startswith(said) for text in caplog.messages)


def test_a_step_that_the_name_alone_says_is_taken_from_it(tmp_path: Path) -> None:
    for name, step in (("epoch_1_step_6.pth", 6), ("model-iter12.pt", 12), ("v2.pth", 0)):
        source = file_of(tmp_path / name, model=net_of(1))
        report = begin(tmp_path / f"run-{name}", source, anyrank.TrainState(net_of(0)))
        assert report.step == step
        said = [note for note in report.notes if "was taken from the name" in note]
        assert len(said) == bool(step)
    source = file_of(tmp_path / "step_7.pth", model=net_of(1), step=3)
    assert begin(tmp_path / "run", source, anyrank.TrainState(net_of(0))).step == 3


def test_whole_epochs_are_said_by_the_caller_or_assumed(tmp_path: Path) -> None:
    source = file_of(tmp_path / "model_2.pth", model=net_of(1), epoch=2)

    def run(folder: str, **options: Any) -> tuple[Any, anyrank.ElasticLoader]:
        loader = anyrank.ElasticLoader(torch.randn(8, 2), global_batch=4, microbatch=2)
        state = anyrank.TrainState(net_of(0), data=loader)
        return begin(tmp_path / folder, source, state, **options), loader

    report, loader = run("assumed")
    assert (report.epoch, loader.epoch, loader.samples) == (2, 2, 16)
    assert any(
        note.startswith("epoch 2 is interpreted as 2 completed epochs") for note in report.notes
    )
    report, loader = run("given", epoch=3)
    assert (report.epoch, loader.epoch, loader.samples) == (3, 3, 24)
    assert "3 whole epochs, from resume(epoch=3)" in report.notes
    assert not any("is interpreted as" in note for note in report.notes)


@pytest.mark.parametrize("given", [{"epoch": 1}, {"parts": {"ema": "model_ema"}}])
def test_both_are_for_another_tools_checkpoint(given: dict[str, Any], tmp_path: Path) -> None:
    state = anyrank.TrainState(net_of(0))
    with anyrank.Checkpoints(tmp_path / "a", state) as ckpts:
        ckpts.save()
        for which in ("auto", tmp_path / "a"):
            with pytest.raises(ValueError, match="applies only to another tool's checkpoint"):
                ckpts.resume(which, **given)
