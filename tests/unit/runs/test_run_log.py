"""`log.jsonl` of a run: what it holds, what it adds up to, and what `inspect` shows of it."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import anyrank
from anyrank.cli import main
from anyrank.runs.resume.run_log import LogLine, read_log
from anyrank.runs.resume.run_time import sum_up
from anyrank.tools.inspect.plot import draw
from anyrank.training.steps.pace import PARTS, WINDOW, Pace, slow_rank

SECONDS = {"steps_sec", "saves_sec", "restart_sec", "waiting_sec"}
KEYS = {"time", "step", "ranks", "redone_steps"} | SECONDS


def train(path: Path, until: int, every: int) -> list[float]:
    """The losses of the steps of a run that goes on to here."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(240, 4), global_batch=8, microbatch=2)
    losses: list[float] = []
    state = anyrank.TrainState(model, optimizer, data=loader)
    with anyrank.Checkpoints(path, state, every=every) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def kill(path: Path, until: int) -> None:
    """As if the process had been killed right after its last line of a step."""
    log = path / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]) + '{"time": 1')
    shutil.rmtree(path / f"step-{until:08}")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def test_each_tenth_step_is_a_line_that_readers_of_metrics_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", itertools.count(1e9).__next__)  # the system's may be set back
    losses = train(tmp_path, until=22, every=15)
    first, ten, twenty, last = rows(tmp_path)
    assert (first["event"], last["event"]) == ("start", "end")
    assert [row["step"] for row in (first, ten, twenty, last)] == [0, 10, 20, 22]
    assert ten.keys() == twenty.keys() == KEYS | {"loss"}
    assert [ten["loss"], twenty["loss"]] == pytest.approx([losses[9], losses[19]], rel=1e-6)
    assert ten["ranks"] == 1
    times = [row["time"] for row in (first, ten, twenty, last)]
    assert times == sorted(set(times))
    assert {int(one // 1e6) for one in times} == {1000}
    assert 0 < ten["steps_sec"] < last["steps_sec"]
    assert last["saves_sec"] > 0


def test_steps_that_are_done_again_after_a_kill_are_counted_and_shown(tmp_path: Path) -> None:
    train(tmp_path, until=22, every=15)
    kill(tmp_path, until=22)
    train(tmp_path, until=30, every=15)
    time_of_run = sum_up(read_log(str(tmp_path)))
    assert time_of_run is not None
    assert (time_of_run.kills, time_of_run.redone_steps, time_of_run.is_open) == (1, 14, False)
    assert time_of_run.steps == 20 + 15
    assert time_of_run.restart_sec > 0
    assert 0 < time_of_run.share < 1
    found = anyrank.inspect(tmp_path)
    assert found.run_time == time_of_run
    assert "; up to 14 steps repeated, 1 kill; ranks 1 -> 1" in " ".join(str(found).split())
    assert max(map(len, str(found).splitlines()[1:])) <= 80  # below the path
    assert json.loads(found.to_json())["run_time"]["share"] == time_of_run.share


def test_a_report_says_how_many_steps_are_done_again(tmp_path: Path) -> None:
    train(tmp_path, until=22, every=15)
    kill(tmp_path, until=22)  # the log's last line is of step 20
    state = anyrank.TrainState(nn.Linear(4, 1))
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        report = ckpts.resume(skip=["optimizer", "data"])
    assert report is not None
    assert (report.step, report.redone_steps) == (15, 20 + 9 - 15)
    assert "  repeated     up to 14 steps after that save" in str(report).splitlines()
    assert "up to 14 later steps will be repeated" in report.in_a_line()


def test_a_run_without_a_save_leaves_no_log_and_no_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    caplog.set_level("INFO", "anyrank.resume")
    ckpts = anyrank.Checkpoints(tmp_path, anyrank.TrainState(model))
    ckpts.step_done()
    ckpts.close()
    assert not (tmp_path / "log.jsonl").exists()
    assert caplog.messages == []
    assert sum_up(read_log(str(tmp_path))) is None


def test_a_run_that_is_opened_again_counts_its_seconds_anew(tmp_path: Path) -> None:
    ckpts = anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.Linear(2, 2)))
    for _ in range(2):
        ckpts.step_done()
        ckpts.save()
        ckpts.close()
    first, first_end, second, _ = rows(tmp_path)
    assert (first["event"], first_end["event"], second["event"]) == ("start", "end", "start")
    assert first_end["saves_sec"] > 0
    assert second["saves_sec"] == 0


def test_a_log_that_cannot_be_written_ends_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log.jsonl").mkdir()
    train(tmp_path, until=22, every=5)
    assert [record.message for record in caplog.records].count(
        f"{tmp_path}: the log ends here: [Errno 21] Is a directory: '{tmp_path}/log.jsonl'"
    ) == 1
    assert anyrank.inspect(tmp_path).run_time is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "\x00\xff", "[]", "3", "null", '{"time": 1}', "[" * 5000, "x" * 100_000),
    ],
)
def test_a_line_that_is_none_is_left_out(text: str, tmp_path: Path) -> None:
    right = LogLine(1.0, 10, 2, 0.5, steps_sec=3.0)
    (tmp_path / "log.jsonl").write_text(f"{text}\n{right.to_json()}\n", errors="replace")
    assert [*read_log(str(tmp_path))] == [right]


def test_the_share_of_time_that_trained_leaves_out_what_is_done_again() -> None:
    first = [LogLine(1, 0, 4, event="start"), LogLine(2, 100, 4, steps_sec=60.0)]
    second = [
        LogLine(3, 50, 2, event="start", redone_steps=50, restart_sec=20.0),
        LogLine(4, 150, 2, event="end", steps_sec=60.0, saves_sec=5.0, restart_sec=20.0),
    ]
    found = sum_up([*first, *second])
    assert found is not None
    assert (found.ranks, found.kills, found.steps, found.redone_steps) == ([4, 2], 1, 200, 50)
    assert found.share == pytest.approx(120 * 0.75 / 145)
    assert str(found) == (
        "62% of the time trained: steps 120.0 s, saves 5.0 s, restarts 20.0 s, waiting 0.0 s; "
        "up to 50 steps repeated, 1 kill; ranks 4 -> 2"
    )


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_loss_and_rank_counts_are_drawn(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    train(tmp_path, until=22, every=15)
    kill(tmp_path, until=22)
    train(tmp_path, until=30, every=15)
    path = tmp_path / f"out.{ending}"
    result = CliRunner().invoke(main, ["inspect", str(tmp_path), "--plot", str(path)])
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    head = path.read_bytes()[:400]
    assert b"<svg" in head if ending == "svg" else head.startswith(b"\x89PNG")
    if ending == "svg":
        assert all(word in path.read_text() for word in ("loss", "ranks", "step"))


def test_a_plot_that_cannot_be_drawn_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(anyrank.LoadError, match="does not exist, or is empty"):
        draw(str(tmp_path), "out.svg")
    train(tmp_path / "run", until=10, every=5)
    for path in ("out.what", "nowhere/out.svg"):
        with pytest.raises(anyrank.AnyrankError, match=f"{path}: cannot write the plot"):
            draw(str(tmp_path / "run"), str(tmp_path / path))
    monkeypatch.setattr("anyrank.tools.inspect.plot.find_spec", lambda name: None)
    with pytest.raises(anyrank.AnyrankError, match=r"pip install 'anyrank\[plot\]'"):
        draw(str(tmp_path), "out.svg")


# -- the slow rank --------------------------------------------------------------------------------


def spent(loader: float, forward: float = 0.1, backward: float = 0.1, spread: float = 0.0) -> Any:
    return [(loader, spread), (forward, spread), (backward, spread), (0.0, 0.0)]


def test_a_rank_stands_out_by_more_than_chance_and_a_share_of_a_step() -> None:
    assert slow_rank([spent(0.1), spent(0.1), spent(0.13)]) == (2, "loader", pytest.approx(0.03))
    assert slow_rank([spent(0.1), spent(0.13)]) == (1, "loader", pytest.approx(0.03))
    assert slow_rank([spent(0.1), spent(0.1), spent(0.13, spread=0.03)]) is None
    assert slow_rank([spent(0.1), spent(0.1), spent(0.109)]) is None
    assert slow_rank([spent(5.0), spent(5.0), spent(5.03)]) is None
    assert slow_rank([spent(0.1)]) is None


@pytest.mark.parametrize("is_called", [True, False])
def test_a_model_that_is_not_called_itself_has_one_part(is_called: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, [optimizer])
    for _ in range(WINDOW):
        (model if is_called else model.forward)(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    pace.close()
    parts = [part for part, (median, _) in zip(PARTS, pace.take_window(), strict=True) if median]
    assert parts == (["loader", "forward", "backward"] if is_called else ["step"])


def test_those_that_wait_in_a_later_part_are_not_it() -> None:
    """As under FSDP2, whose forward waits for the rank with a slow loader."""
    found = slow_rank([spent(0.1, 0.13), spent(0.1, 0.13), spent(0.13, 0.1)])
    assert found is not None
    assert found[:2] == (2, "loader")


@pytest.mark.parametrize(
    ("error", "kills", "errors"),
    [
        (anyrank.RankError("rank 1 died", causes={1: "no answer"}), 1, 0),
        (anyrank.RankError("the connection between the ranks broke"), 1, 0),
        (anyrank.RankError("fetching a batch failed", causes={1: "ValueError: a row"}), 0, 1),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), 1, 0),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), 1, 0),
        (ValueError("of the script"), 0, 1),
        (KeyboardInterrupt(), 0, 0),
    ],
)
def test_the_death_of_another_rank_is_a_kill_and_an_exception_is_none(
    tmp_path: Path, error: BaseException, kills: int, errors: int
) -> None:
    state = anyrank.TrainState(nn.Linear(2, 1))
    ckpts = anyrank.Checkpoints(tmp_path, state)
    ckpts.save()
    ckpts.step_done()
    ckpts.__exit__(type(error), error, None)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        report = ckpts.resume()
        assert report is not None
        assert report.redone_steps == 1  # all of these leave a last line
        ckpts.step_done()
    time_of_run = sum_up(read_log(str(tmp_path)))
    assert time_of_run is not None
    assert (time_of_run.kills, time_of_run.errors, time_of_run.ranks) == (kills, errors, [1, 1])
    assert ("1 error" in str(time_of_run)) is bool(errors)
