"""Promise 6: a checkpoint is whole or it is not there, whenever and wherever a process is killed.

A run saves steps 1, 2 and 3, the third with retention. Either all of its processes are killed at
one file event of the third save, or one rank is, while the others live on. Then the run is resumed,
and must be at step 3 when that was committed, else at step 2, with the values of the run that was
never stopped; and its next step is saved.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nets import values
from tests.runs import resume, save
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank import faults
from anyrank.files.manifest import parse
from anyrank.testing import Died, Fault, run_ranks

EVENTS = [
    *("file.folder", "file.open", "file.write", "file.fsync", "file.rename", "file.remove"),
    *("file.copy", "save.stage", "save.write", "save.commit", "save.metadata"),
]
SOME_EVENTS = ["file.open", "save.stage", "save.write", "save.commit", "save.metadata"]
LAST = 3


@dataclass(frozen=True)
class Recorded:
    """An uninterrupted run.

    Attributes:
        values: of all parameters, after each step.
        counts: for each rank and event, how often it passed before the last save, and in it.
        copies: the folder at each event of the last save.
    """

    values: list[Any]
    counts: list[dict[str, tuple[int, int]]]
    copies: list[Path]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if torch.distributed.is_initialized():
        net = fully_shard(net)
    # Each of the many ranks that replace a killed one takes a second to learn how to shard Adam.
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(path: str, background: bool, on_last: Callable[[], None]) -> list[Any]:
    """Three steps, each saved; the values after each."""
    net, optimizer = build()
    seen: list[Any] = []
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, keep=2, every=1, background=background) as ckpts:
        for step in range(LAST):
            learn(net, optimizer, step)
            seen.append(values(net))  # before the save: a kill in it ends the ranks' collectives
            if step == LAST - 1:
                ckpts.wait()
                on_last()
            ckpts.step_done()
    return seen


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    net(torch.ones(1, 3) * (step + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def job_record(path: str, background: bool) -> tuple[list[Any], dict[str, tuple[int, int]]]:
    """The uninterrupted run, and how often each event passed before and in the last save.

    At each event of the last save the folder is copied to `path`-rank-event-passage: what a kill of
    all processes leaves there, as a file keeps what a killed process has written to it.
    """
    rank = os.environ["RANK"]
    count = dict.fromkeys(EVENTS, 0)
    before: dict[str, int] = {}

    def passed(name: str) -> None:
        count[name] += 1
        if before:
            shutil.copytree(path, f"{path}-{rank}-{name}-{count[name]}")

    for name in EVENTS:
        faults.armed[name] = lambda name=name: passed(name)
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


def job_resume(paths: list[str]) -> list[tuple[int, Any, list[str], list[int]]]:
    """For each run: the step that is resumed, its values, what was set aside; the steps after one
    more."""
    found: list[tuple[int, Any, list[str], list[int]]] = []
    for path in paths:
        net, optimizer = build()
        state = anyrank.TrainState(net, optimizer)
        with anyrank.Checkpoints(path, state, keep=2, every=1) as ckpts:
            report = ckpts.resume("must")
            assert report is not None
            resumed = values(net)
            learn(net, optimizer, report.step)
            ckpts.step_done()
            steps = [saved.step for saved in ckpts.saved()]
            found.append((report.step, resumed, report.set_aside, steps))
    return found


def kills(counts: list[dict[str, tuple[int, int]]], events: list[str]) -> list[Fault]:
    """Faults at the first and the last passage of events in the last save, on the first and the
    last rank.

    What the others wait for, and so what they do, is the same for the passages in between.
    """
    return [
        Fault(rank, name, "kill", before + number)
        for rank in sorted({0, len(counts) - 1})
        for name, (before, inside) in counts[rank].items()
        for number in sorted({1, inside})
        if inside and name in events
    ]


def check_resumes(world: int, paths: list[Path], seen: list[Any], init: bool = True) -> None:
    """Each of these runs goes on from its last commit."""
    committed = [(path / "step-00000003" / "anyrank.json").exists() for path in paths]
    assert True in committed
    assert False in committed
    resumed = run_ranks(world, job_resume, [str(path) for path in paths], init=init)[0]
    for path, whole, (step, found, aside, steps) in zip(paths, committed, resumed, strict=True):
        assert step == (3 if whole else 2), path
        assert found == seen[step - 1], path
        assert aside == [], path
        assert steps == [step + 1, step], path


WORLDS = pytest.mark.parametrize(
    ("world", "background"),
    [(1, False), (2, False), (4, False), (2, True)],
    ids=["1", "2", "4", "2-background"],
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Recorded]:
    """`recorded(world, background)`: the uninterrupted run, made when it is first asked for."""

    @functools.cache
    def record(world: int, background: bool) -> Recorded:
        folder = tmp_path_factory.mktemp("recorded")
        answers = run_ranks(world, job_record, str(folder / "run"), background)
        assert (folder / "run" / "step-00000003" / "anyrank.json").exists()
        copies = sorted(path for path in folder.iterdir() if path.name != "run")
        return Recorded(answers[0][0], [counts for _, counts in answers], copies)

    return record


@WORLDS
def test_a_kill_of_all_ranks_at_any_file_event_loses_no_commit(
    recorded: Callable[[int, bool], Recorded], world: int, background: bool
) -> None:
    run = recorded(world, background)
    assert len(run.copies) == sum(inside for each in run.counts for _, inside in each.values())
    assert len(run.copies) >= 30
    # On one rank, whatever the number was: this is about what is in the folder.
    check_resumes(1, run.copies, run.values, init=False)


@WORLDS
def test_a_kill_of_one_rank_ends_the_others_and_loses_no_commit(
    tmp_path: Path, recorded: Callable[[int, bool], Recorded], world: int, background: bool
) -> None:
    run = recorded(world, background)
    # The files are written by the same code, whatever the number of ranks and the thread.
    events = EVENTS if (world, background) in [(1, False), (2, False)] else SOME_EVENTS
    chosen = kills(run.counts, events)
    paths = [tmp_path / str(number) for number in range(len(chosen))]
    for path, fault in zip(paths, chosen, strict=True):
        ends = run_ranks(world, job_train, str(path), background, faults=[fault])
        assert isinstance(ends[fault.rank], Died), fault
        survivors = {end for rank, end in enumerate(ends) if rank != fault.rank}
        is_release = fault.point == "file.remove"  # of the lock, maybe, when all is over
        assert survivors <= ({"RankError", "done"} if is_release else {"RankError"}), fault
    check_resumes(world, paths, run.values)


def job_full_disk(path: str, background: bool) -> tuple[list[str], list[int], int]:
    """Train with a disk that fills up in the third save, then save again."""
    net, optimizer = build()
    state = anyrank.TrainState(net, optimizer)
    errors: list[str] = []
    records: list[Any] = []
    with anyrank.Checkpoints(
        path, state, every=1, background=background, on_commit=records.append
    ) as ckpts:
        for _ in range(5):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            try:
                ckpts.step_done()
                ckpts.wait()
            except anyrank.CheckpointError as error:
                errors.append(str(error))
        return errors, [one.step for one in ckpts.saved()], len(records)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("event", ["file.open", "file.write", "file.fsync", "file.rename"])
def test_a_full_disk_is_one_error_on_all_ranks_and_harms_no_commit(
    tmp_path: Path, recorded: Callable[[int, bool], Recorded], event: str, background: bool
) -> None:
    fault = Fault(0, event, "enospc", recorded(2, background).counts[0][event][0] + 1)
    answers = run_ranks(2, job_full_disk, str(tmp_path / "run"), background, faults=[fault])
    (*alike, commits), (*others, _) = answers
    errors, steps = alike
    assert others == alike
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert "Free space" in errors[0]
    assert steps == [5, 4, 2]
    assert commits == 4  # which the first rank hears of


def test_a_slow_rank_changes_nothing(tmp_path: Path) -> None:
    fault = Fault(1, "file.write", "slow", 3, seconds=1.5)
    assert run_ranks(2, job_train, str(tmp_path), False, faults=[fault]) == ["done", "done"]
    assert run_ranks(2, job_resume, [str(tmp_path)])[0][0][0] == 3


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    net, optimizer = build()
    ckpts = anyrank.Checkpoints(tmp_path / "file" / "run", anyrank.TrainState(net, optimizer))
    with pytest.raises(anyrank.CheckpointError, match=r"file is a file\. Pass a different path"):
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
            assert not anyrank.verify(newest), (name, bit)
            if name == ".metadata":  # which torch.distributed.checkpoint alone reads
                continue
            small = not name.endswith((".distcp", ".xxh3"))
            for verify in (True, False) if small else (True,):
                net, optimizer = build()
                state = anyrank.TrainState(net, optimizer)
                report = resume(tmp_path, state, verify=verify)
                assert report is not None
                assert (report.step, report.lost_steps) == (1, 1), (name, bit, verify)
                (aside,) = report.set_aside
                assert aside.startswith(".aside-damaged-step-00000002")
                (tmp_path / aside).rename(newest)
        (newest / name).write_bytes(data)
    state = anyrank.TrainState(*build())
    report = resume(tmp_path, state, verify=True)
    assert report is not None
    assert report.step == 2


HARMS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda step: os.truncate(step / "__0_0.distcp", 100),
    "longer": lambda step: os.truncate(step / "__0_0.distcp", 1 << 20),
    "no data": lambda step: (step / "__0_0.distcp").unlink(),
    "no checksums": lambda step: (step / "__0_0.xxh3").unlink(),
    "no index": lambda step: (step / "tensors.json").unlink(),
    "no index of a rank": lambda step: (step / "__0_0.json").unlink(),
    "a rank's index is cut": lambda step: os.truncate(step / "__0_0.json", 40),
    "a rank's index is longer": lambda step: os.truncate(step / "__0_0.json", 1 << 16),
    "a rank's index is of another save": lambda step: (step / "__0_0.json").write_bytes(
        (step / "__0_0.json").read_bytes().replace(b"0", b"1", 1)
    ),
    "an index is of another save": lambda step: (step / "tensors.json").write_bytes(
        (step / "tensors.json").read_bytes().replace(b"0", b"1", 1)
    ),
    "no manifest": lambda step: (step / "anyrank.json").unlink(),
    "nothing": lambda step: [file.unlink() for file in step.iterdir()],
    "manifest is no JSON": lambda step: (step / "anyrank.json").write_text("{"),
    "manifest is another value": lambda step: (step / "anyrank.json").write_text("[]"),
    "manifest is empty": lambda step: (step / "anyrank.json").write_text(""),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_set_aside_and_the_step_before_is_taken(
    tmp_path: Path, harm: str, verify: bool
) -> None:
    saved_run(tmp_path)
    HARMS[harm](tmp_path / "step-00000002")
    state = anyrank.TrainState(*build())
    report = resume(tmp_path, state, verify=verify)
    assert report is not None
    assert (report.step, report.lost_steps) == (1, 1)
    assert "LOST" in str(report)
    assert (tmp_path / report.set_aside[0]).is_dir()


def test_a_step_is_whole_without_what_dcp_alone_reads(tmp_path: Path) -> None:
    """Its first rank may be killed between the commit and that."""
    saved_run(tmp_path)
    newest = tmp_path / "step-00000002"
    (newest / ".metadata").unlink()
    report = anyrank.verify(tmp_path)
    assert report
    assert "no .metadata in step 2, which only torch.distributed.checkpoint reads" in str(report)
    net, optimizer = build()
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(net, optimizer), every=1) as ckpts:
        resumed = ckpts.resume()
        assert resumed is not None
        assert (resumed.step, resumed.set_aside) == (2, [])
        learn(net, optimizer, 2)
        ckpts.step_done()
    assert (tmp_path / "step-00000003" / ".metadata").exists()


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "of another plan", "gone"])
def test_a_damaged_metadata_is_not_copied(tmp_path: Path, harm: str) -> None:
    net, optimizer, _ = saved_run(tmp_path)
    path = tmp_path / "step-00000002" / ".metadata"
    whole = path.read_bytes()
    if harm == "of another plan":
        torch.manual_seed(0)
        save(tmp_path / "other", anyrank.TrainState(nn.Linear(7, 7)))
        path.write_bytes((tmp_path / "other/step-00000000/.metadata").read_bytes())
    elif harm == "gone":
        path.unlink()
        (tmp_path / "step-00000001/.metadata").write_bytes(b"")
    else:
        changed = {"flipped": whole[:40] + b"?" + whole[41:], "cut": whole[:-9], "empty": b""}
        path.write_bytes(changed[harm])
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(tmp_path, state, every=1) as ckpts:
        ckpts.resume()
        ckpts.step_done()
    assert (tmp_path / "step-00000003" / ".metadata").read_bytes() == whole


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    _, optimizer, state = saved_run(tmp_path)
    optimizer.param_groups[0]["caf\u00e9"] = 1e-5  # 1E-05 and \u00E9 are the same value
    state.step += 1
    save(tmp_path, state)
    data = (tmp_path / "step-00000003/anyrank.json").read_bytes()
    parse(data, "x")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(anyrank.CorruptCheckpoint):
            parse(bytes(changed), "x")


@pytest.mark.parametrize("lost", ["tensors.json", "anyrank.json"])
def test_when_all_are_damaged_nothing_starts_anew(tmp_path: Path, lost: str) -> None:
    saved_run(tmp_path)
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name / lost).unlink()
    for match in ("all 2 checkpoints are corrupt", "only corrupt steps, which were renamed to"):
        state = anyrank.TrainState(*build())
        with pytest.raises(anyrank.CheckpointError, match=match):
            resume(tmp_path, state, "auto")


def test_a_copy_that_fails_in_the_middle_poisons_the_state(tmp_path: Path) -> None:
    _, _, state = saved_run(tmp_path)
    faults.armed["resume.commit"] = lambda: (_ for _ in ()).throw(OSError("gone"))
    try:
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            with pytest.raises(anyrank.CheckpointError, match="only partly restored"):
                ckpts.resume()
            with pytest.raises(anyrank.CheckpointError, match="only partly restored"):
                ckpts.step_done()
            faults.armed.clear()
            assert ckpts.resume() is not None
            ckpts.step_done()
    finally:
        faults.armed.clear()
