"""Promise 6: a checkpoint is whole or it is not there, whenever and wherever a process is killed.

A run saves steps 1, 2 and 3, the third with retention. One rank is killed at one file event of the
third save; then the run is resumed, and must be at step 3 when that was committed, else at step 2,
with the values of the run that was never stopped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, run_ranks

EVENTS = ["file.folder", "file.open", "file.write", "file.fsync", "file.rename", "file.remove"]
EVENTS += ["save.stage", "save.write", "save.commit"]
LAST = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if torch.distributed.is_initialized():
        net = fully_shard(net)
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def values(net: nn.Module) -> list[list[float]]:
    """Every parameter, whole."""
    tensors: list[Any] = [p.detach() for p in net.parameters()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.flatten().tolist() for t in whole]


def be_quick() -> None:
    """Survivors need not wait long for a rank that the test has killed."""
    import anyrank.world.lines as world

    world.ROLL_CALL_SEC = 0.2  # type: ignore[misc]


def train(path: str, background: bool, on_last: Any) -> list[Any]:
    """Three steps, each saved; the values after each."""
    be_quick()
    net, optimizer = build()
    seen: list[Any] = []
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, keep=2, every=1, background=background) as ckpts:
        for step in range(LAST):
            net(torch.ones(1, 3) * (step + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(values(net))  # before the save: a kill in it ends the ranks' collectives
            if step == LAST - 1:
                ckpts.wait()
                on_last()
            ckpts.step_done()
    return seen


def job_count(path: str, background: bool) -> tuple[list[Any], dict[str, tuple[int, int]]]:
    """The uninterrupted run, and how often each event passed before and in the last save."""
    count = dict.fromkeys(EVENTS, 0)
    before: dict[str, int] = {}

    def add(name: str) -> None:
        count[name] += 1

    for name in EVENTS:
        faults.armed[name] = lambda name=name: add(name)
    try:
        seen = train(path, background, lambda: before.update(count))
    finally:
        faults.armed.clear()
    return seen, {name: (before[name], count[name] - before[name]) for name in EVENTS}


def job_train(path: str, background: bool) -> str:
    try:
        train(path, background, lambda: None)
    except anyrank.AnyrankError as error:
        return type(error).__name__
    return "done"


def job_resume(path: str) -> tuple[int, Any, list[str]]:
    net, optimizer = build()
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, verify="full") as ckpts:
        report = ckpts.resume("must")
        assert report is not None
        return report.step, values(net), report.set_aside


def kills(world: int, counts: list[dict[str, tuple[int, int]]]) -> list[Fault]:
    """One fault for each event of the last save, on each rank."""
    return [
        Fault(rank, name, "kill", before + number)
        for rank in range(world)
        for name, (before, inside) in counts[rank].items()
        for number in range(1, inside + 1)
    ]


def check_every_kill(tmp_path: Path, world: int, background: bool, of_ranks: list[int]) -> None:
    """Kill at each event of the last save on these ranks, and resume."""
    answers = run_ranks(world, job_count, str(tmp_path / "whole"), background)
    seen, counts = answers[0][0], [answer[1] for answer in answers]
    assert (tmp_path / "whole" / "step-00000003" / "anyrank.json").exists()
    chosen = [fault for fault in kills(world, counts) if fault.rank in of_ranks]
    assert len(chosen) >= 20
    for number, fault in enumerate(chosen):
        path = tmp_path / str(number)
        ends = run_ranks(world, job_train, str(path), background, faults=[fault])
        assert isinstance(ends[fault.rank], Died), fault
        committed = (path / "step-00000003" / "anyrank.json").exists()
        step, found, aside = run_ranks(world, job_resume, str(path))[0]
        assert step == (3 if committed else 2), fault
        assert found == seen[step - 1], fault
        assert aside == [], fault


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "background", "of_ranks"),
    [(1, False, [0]), (2, False, [0, 1]), (4, False, [0, 3]), (2, True, [0, 1])],
    ids=["1", "2", "4", "2-background"],
)
def test_a_kill_at_any_file_event_loses_no_commit(
    tmp_path: Path, world: int, background: bool, of_ranks: list[int]
) -> None:
    check_every_kill(tmp_path, world, background, of_ranks)


def job_full_disk(path: str, background: bool) -> tuple[list[str], list[int], int]:
    """Train with a disk that fills up in the third save, then save again."""
    net, optimizer = build()
    state = anyrank.TrainState(net, optimizer)
    errors: list[str] = []
    with anyrank.Checkpoints(path, state, every=1, background=background) as ckpts:
        for _ in range(5):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            try:
                ckpts.step_done()
                ckpts.wait()
            except anyrank.CheckpointError as error:
                errors.append(str(error))
        return errors, [one.step for one in ckpts.saved()], len(ckpts.stats())


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("event", ["file.open", "file.write", "file.fsync", "file.rename"])
def test_a_full_disk_is_one_error_on_all_ranks_and_harms_no_commit(
    tmp_path: Path, event: str, background: bool
) -> None:
    counts = run_ranks(2, job_count, str(tmp_path / "whole"), background)[0][1]
    fault = Fault(0, event, "enospc", counts[event][0] + 1)
    answers = run_ranks(2, job_full_disk, str(tmp_path / "run"), background, faults=[fault])
    assert answers[0] == answers[1]
    errors, steps, saves = answers[0]
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert "free space" in errors[0]
    assert steps == [5, 4, 2]
    assert saves == 4


def test_a_slow_rank_changes_nothing(tmp_path: Path) -> None:
    fault = Fault(1, "file.write", "slow", 3, seconds=1.5)
    assert run_ranks(2, job_train, str(tmp_path), False, faults=[fault]) == ["done", "done"]
    assert run_ranks(2, job_resume, str(tmp_path))[0][0] == 3


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    net, optimizer = build()
    ckpts = anyrank.Checkpoints(tmp_path / "file" / "run", anyrank.TrainState(net, optimizer))
    with pytest.raises(anyrank.CheckpointError, match="cannot be written: Not a directory"):
        ckpts.save()
    assert os.listdir(tmp_path) == ["file"]


def saved_run(path: Path) -> tuple[nn.Module, torch.optim.Optimizer, anyrank.TrainState]:
    """A run of one process with steps 1 and 2."""
    net, optimizer = build()
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        for _ in range(2):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            ckpts.step_done()
    return net, optimizer, state


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    saved_run(tmp_path)
    newest = tmp_path / "step-00000002"
    generator = torch.Generator().manual_seed(0)
    for name in sorted(os.listdir(newest)):
        data = (newest / name).read_bytes()
        for _ in range(12):
            bit = int(torch.randint(len(data) * 8, (), generator=generator))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (newest / name).write_bytes(changed)
            small = not name.endswith(".distcp")
            for verify in ("size", "full", "off") if small else ("full",):
                net, optimizer = build()
                state = anyrank.TrainState(net, optimizer)
                report = resume(tmp_path, state, verify=verify)
                assert report is not None
                assert (report.step, report.lost_steps) == (1, 1), (name, bit, verify)
                (aside,) = report.set_aside
                assert aside.startswith(".bad-damaged-step-00000002")
                (tmp_path / aside).rename(newest)
        (newest / name).write_bytes(data)
    state = anyrank.TrainState(*build())
    report = resume(tmp_path, state, verify="full")
    assert report is not None
    assert report.step == 2


@pytest.mark.parametrize("harm", ["truncate", "remove data", "remove index", "not JSON", "empty"])
def test_damage_is_set_aside_and_the_step_before_is_taken(tmp_path: Path, harm: str) -> None:
    saved_run(tmp_path)
    newest = tmp_path / "step-00000002"
    data = newest / "__0_0.distcp"
    if harm == "truncate":
        os.truncate(data, 100)
    elif harm == "remove data":
        data.unlink()
    elif harm == "remove index":
        (newest / "tensors.json").unlink()
    else:
        (newest / "anyrank.json").write_text("{" if harm == "not JSON" else "")
    state = anyrank.TrainState(*build())
    report = resume(tmp_path, state)
    assert report is not None
    assert (report.step, report.lost_steps) == (1, 1)
    assert "LOST" in str(report)
    assert (tmp_path / report.set_aside[0]).is_dir()


def test_when_all_are_damaged_nothing_starts_anew(tmp_path: Path) -> None:
    saved_run(tmp_path)
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name / "tensors.json").unlink()
    for match in ("all 2 checkpoints are damaged", "damaged ones set aside"):
        state = anyrank.TrainState(*build())
        with pytest.raises(anyrank.CheckpointError, match=match):
            resume(tmp_path, state, "auto")


def test_a_copy_that_fails_in_the_middle_poisons_the_state(tmp_path: Path) -> None:
    _, _, state = saved_run(tmp_path)
    faults.armed["resume.commit"] = lambda: (_ for _ in ()).throw(OSError("gone"))
    try:
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            with pytest.raises(anyrank.CheckpointError, match="half restored"):
                ckpts.resume()
            with pytest.raises(anyrank.CheckpointError, match="half restored"):
                ckpts.step_done()
            faults.armed.clear()
            assert ckpts.resume() is not None
            ckpts.step_done()
    finally:
        faults.armed.clear()
