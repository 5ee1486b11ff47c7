"""`Checkpoints(peers=True)`: a run goes on from its machines' memory, whatever was killed when.

The memory is a folder that outlives the ranks, as `anyrank run` makes one; machines are ranks that
call their hosts by different names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nets import values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank import faults
from anyrank.settings import PEERS_FOLDER
from anyrank.testing import Died, Fault, run_ranks

LAST = 5
Whole = Callable[[str], dict[int, Any]]
EVENTS = ["file.open", "file.write", "file.rename", "file.remove", "peers.write", "peers.commit"]


@contextlib.contextmanager
def machine(memory: str, number: int = 0) -> Iterator[None]:
    """This rank on a machine of its own, with its memory."""
    os.makedirs(f"{memory}/{number}", exist_ok=True)
    real = socket.gethostname
    socket.gethostname = lambda: f"machine{number}"
    os.environ[PEERS_FOLDER] = f"{memory}/{number}"
    try:
        yield
    finally:
        socket.gethostname = real
        del os.environ[PEERS_FOLDER]


def build(wrap: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.2), nn.Tanh(), nn.Linear(10, 3))
    if wrap == "fsdp":
        return fully_shard(net)
    return DistributedDataParallel(net) if wrap == "ddp" else net


def train(path: str, wrap: str, until: int = LAST, **options: Any) -> Any:
    """A run up to a step: where it began, all values after each step, and the receipts."""
    exact, stop_at = options.pop("exact", False), options.pop("stop_at", None)
    which = options.pop("which", "auto")
    net = build(wrap)
    average = build("fsdp" if wrap == "fsdp" else "plain").requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    rows = torch.arange(24 * 6).reshape(24, 6) / 100
    loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=2, exact=exact)
    state = anyrank.TrainState(net, optimizer, scheduler=schedule, data=loader, ema=average)
    seen: dict[int, Any] = {}
    with anyrank.Checkpoints(path, state, peers=True, **options) as ckpts:
        report = ckpts.resume(which)
        for step in ckpts.steps(until=until):
            if step.number == stop_at:
                raise KeyboardInterrupt
            for x in step.microbatches(net):
                step.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)
            seen[step.number + 1] = [values(net), values(average), schedule.get_last_lr()]
    receipts = [(one.epoch, one.samples, one.verdict) for one in loader.receipts]
    came_from = None if report is None else (report.step, report.path, report.notes)
    return came_from, seen, receipts, state.samples


def job_train(
    memory: str, path: str, wrap: str, machines: list[int] | None = None, **options: Any
) -> Any:
    rank = int(os.environ.get("RANK", "0"))
    with machine(memory, machines[rank] if machines else 0):
        try:
            return train(path, wrap, **options)
        except anyrank.AnyrankError as error:
            return f"{type(error).__name__}: {error}"


def check(answer: Any, seen: dict[int, Any], step: int, memory: str | None) -> None:
    """A run went on at this step, from this memory, and as the uninterrupted one."""
    assert not isinstance(answer, str), answer
    (resumed, path, _), after, receipts, samples = answer
    assert resumed == step
    assert path.startswith(f"{memory}/") == (memory is not None)
    assert after.keys() == set(range(step + 1, LAST + 1))
    torch.testing.assert_close(after, {n: seen[n] for n in after}, rtol=1e-5, atol=1e-6)
    assert (receipts, samples) == ([(0, 24, "exactly once"), (1, 24, "exactly once")], 60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The values after each step of a run that is never killed, by its wrapper."""

    @functools.cache
    def values_of(wrap: str) -> dict[int, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return run_ranks(2, job_train, str(folder / "memory"), str(folder / "run"), wrap)[0][1]

    return values_of


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_killed_rank_costs_the_step_it_was_in(tmp_path: Path, wrap: str, whole: Whole) -> None:
    seen = whole(wrap)
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    # Of seven collective steps, the fourth: three were completed.
    kill = Fault(1, "peers.write", "kill", 4)
    ends = run_ranks(4, job_train, memory, path, wrap, faults=[kill])
    assert isinstance(ends[1], Died)
    assert all(ends[n].startswith("RankError") for n in (0, 2, 3))
    assert not Path(path).exists()  # no file was ever written
    for size in (4, 3) if wrap == "fsdp" else (2,):
        copy = f"{memory}-{size}"
        shutil.copytree(memory, copy)
        answer, *_ = run_ranks(size, job_train, copy, path, wrap)
        check(answer, seen, 3, copy)
        shutil.rmtree(path)
    answer, *_ = run_ranks(1, job_train, memory, path, "plain", init=False)
    check(answer, seen, 3, memory)


@pytest.mark.parametrize("wrap", [pytest.param("fsdp", marks=pytest.mark.exact_fsdp), "ddp"])
def test_with_exact_the_bits_are_those_of_a_run_that_was_never_killed(
    tmp_path: Path, wrap: str
) -> None:
    options: dict[str, Any] = {"exact": True, "background": True, "every": 2}
    folders = str(tmp_path / "m"), str(tmp_path / "whole")
    (_, seen, *_), *_ = run_ranks(3, job_train, *folders, wrap, **options)
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    kill = Fault(2, "peers.write", "kill", 4)
    run_ranks(4, job_train, memory, path, wrap, faults=[kill], **options)
    answer, *_ = run_ranks(2, job_train, memory, path, wrap, **options)
    check(answer, seen, 3, memory)
    assert answer[1] == {n: seen[n] for n in answer[1]}


# -- kills within a snapshot ----------------------------------------------------------------------


def job_record(memory: str, path: str, last: int) -> tuple[dict[int, Any], int]:
    """A run whose memory is copied at each event of one step's snapshot: what a kill then leaves.

    By the first rank, which renames and removes: a copy takes a while, and must be of one instant.
    Also the most snapshots that there were at any event.
    """
    counts, most = dict.fromkeys(EVENTS, 0), 0
    folder = Path(memory, "0")

    def passed(name: str) -> None:
        nonlocal most
        steps = [one for run in folder.iterdir() for one in run.iterdir()]
        most = max(most, len(steps))
        if any(one.name.startswith(f"step-{last:08}") for one in steps):
            counts[name] += 1
            shutil.copytree(memory, f"{memory}-at-{name}-{counts[name]}")

    for name in EVENTS if os.environ["RANK"] == "0" else ():
        faults.armed[name] = lambda name=name: passed(name)
    try:
        _, seen, *_ = job_train(memory, path, "fsdp")
    finally:
        faults.armed.clear()
    return seen, most


def job_resumes(copies: list[str], path: str) -> list[Any]:
    answers: list[Any] = []
    for copy in copies:
        shutil.rmtree(
            path, ignore_errors=True
        )  # the files of the run before: there is the memory alone
        answers.append(job_train(copy, path, "plain"))
    return answers


def test_a_kill_at_any_event_of_a_snapshot_leaves_a_whole_one(tmp_path: Path) -> None:
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    (seen, most), *_ = run_ranks(2, job_record, memory, path, 4)
    assert most == 2
    copies = sorted(str(one) for one in tmp_path.glob("memory-at-*"))
    assert len(copies) >= 10
    (answers,) = run_ranks(1, job_resumes, copies, path, init=False)
    for copy, answer in zip(copies, answers, strict=True):
        check(answer, seen, answer[0][0], copy)
    assert {answer[0][0] for answer in answers} == {3, 4, 5}  # until 4 is removed


# -- which is the newest --------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Memory (step 3) and files (step 2) of a run that was interrupted in its fourth step."""
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    with machine(memory), pytest.raises(KeyboardInterrupt):
        train(path, "plain", every=2, stop_at=3)
    return memory, path


def resumed(memory: str, path: str) -> Any:
    """Where a run in this process goes on: step, path and notes."""
    with machine(memory):
        step, found, notes = train(path, "plain", every=2)[0]
    return step, found, [note for note in notes if note.startswith("skipped")]


def data_of(folder: str, step: int) -> Path:
    (found,) = Path(folder).glob(f"**/step-{step:08}/*.distcp")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 64):
        data[at] ^= 1
    path.write_bytes(data)


def test_memory_that_is_newer_than_the_files_is_resumed(places: tuple[str, str]) -> None:
    memory, path = places
    flip(data_of(path, 2))  # which nobody reads
    place = str(data_of(memory, 3).parent)
    assert resumed(memory, path) == (3, place, [])


def test_files_that_are_newer_than_the_memory_are_resumed(places: tuple[str, str]) -> None:
    memory, path = places
    train(path, "plain", until=4)  # with no memory: from step 2, and on to 4
    assert resumed(memory, path)[:2] == (4, f"{path}/step-00000004")


@pytest.mark.parametrize("how", ["flipped", "gone", "no manifest", "forged", "all gone"])
def test_without_a_whole_snapshot_the_files_are_resumed(places: tuple[str, str], how: str) -> None:
    memory, path = places
    data = data_of(memory, 3)
    if how == "flipped":
        flip(data)
    elif how == "gone":
        data.unlink()
    elif how == "no manifest":
        data.with_name("anyrank.json").unlink()
    elif how == "forged":
        flip(data.with_name("tensors.json"))
    else:
        shutil.rmtree(memory)
    step, found, notes = resumed(memory, path)
    assert (step, found) == (2, f"{path}/step-00000002")
    assert len(notes) == (1 if how in ("flipped", "forged") else 0)


def test_a_damaged_file_is_skipped_for_older_memory(places: tuple[str, str]) -> None:
    memory, path = places
    train(path, "plain", until=4)
    flip(data_of(path, 4))
    place = str(data_of(memory, 3).parent)
    assert resumed(memory, path)[:2] == (3, place)


@pytest.mark.parametrize("form", [2, "step-00000002"])
def test_a_step_that_was_asked_for_is_gone_on_from_and_not_the_memory(
    places: tuple[str, str], form: int | str
) -> None:
    memory, path = places
    which = f"{path}/{form}" if isinstance(form, str) else form
    with machine(memory), pytest.raises(KeyboardInterrupt):
        train(path, "plain", which=which, stop_at=2)
    assert resumed(memory, path)[:2] == (2, f"{path}/step-00000002")


def test_memory_of_another_run_is_not_resumed(places: tuple[str, str]) -> None:
    memory, path = places
    shutil.rmtree(path)
    train(path, "plain", until=2)  # another run, with no memory
    assert resumed(memory, path)[:2] == (2, f"{path}/step-00000002")


# -- without memory -------------------------------------------------------------------------------


def test_without_a_launcher_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, seen, *_ = train(str(tmp_path / "run"), "plain")
    assert (found, len(seen)) == (None, LAST)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said.startswith("peers= has no effect: no memory survives rank 0.")


def job_no_room(memory: str, path: str) -> Any:
    answer = job_train(memory, path, "fsdp", every=2)
    return list(answer[1]), [one.name for one in Path(memory).glob("0/*/*")]


def test_a_memory_without_room_does_not_stop_the_run(tmp_path: Path) -> None:
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    full = Fault(1, "file.write", "enospc", 10)  # of three a snapshot, and a save: in the third
    for keys, left in run_ranks(2, job_no_room, memory, path, faults=[full]):
        assert keys == [1, 2, 3, 4, 5]
        assert left == []
    assert sorted(one.name for one in Path(path).glob("step-*")) == [
        f"step-{step:08}" for step in (2, 4, 5)
    ]


def job_diverged(memory: str) -> None:
    with machine(memory):
        net = build("ddp")
        state = anyrank.TrainState(net)
        with anyrank.Checkpoints(f"{memory}/run", state, peers=True) as ckpts:
            with torch.no_grad():
                next(net.parameters()).add_(float(os.environ["RANK"]))
            with pytest.raises(anyrank.CheckpointError, match="replicas differ"):
                ckpts.step_done()
            raise KeyboardInterrupt


def test_replicas_that_differ_are_refused_as_in_a_save(tmp_path: Path) -> None:
    with pytest.raises(anyrank.testing.RanksFailed, match="KeyboardInterrupt"):
        run_ranks(2, job_diverged, str(tmp_path))


# -- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "before", "after", "lost"),
    [
        ("fsdp", [0, 0, 1, 1], [1, 1], [0]),
        ("ddp", [0, 0, 1, 1], [0, 0, 1, 1], [1]),  # a new machine in its place
        ("fsdp", [0, 1, 2], [2, 0], [1]),
        ("ddp", [0, 0, 1], [1], [0]),
        ("fsdp", [0, 1, 2], [2, 0, 1], []),  # all are there, and ranks come up elsewhere
    ],
)
def test_a_lost_machine_costs_nothing(
    tmp_path: Path, whole: Whole, wrap: str, before: list[int], after: list[int], lost: list[int]
) -> None:
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    kill = Fault(0, "peers.write", "kill", 4)
    run_ranks(len(before), job_train, memory, path, wrap, machines=before, faults=[kill])
    for number in lost:
        shutil.rmtree(f"{memory}/{number}")
    answers = run_ranks(len(after), job_train, memory, path, wrap, machines=after)
    check(answers[0], whole(wrap), 3, memory)
    assert all(one[1:] == answers[0][1:] for one in answers)


def test_two_lost_neighbors_of_three_machines_cost_what_the_files_do_not_have(
    tmp_path: Path, whole: Whole
) -> None:
    memory, path = str(tmp_path / "memory"), str(tmp_path / "run")
    kill = Fault(0, "peers.write", "kill", 4)
    options: dict[str, Any] = {"machines": [0, 1, 2], "every": 2}
    run_ranks(3, job_train, memory, path, "fsdp", faults=[kill], **options)
    for number in (0, 1):
        shutil.rmtree(f"{memory}/{number}")
    answers = run_ranks(3, job_train, memory, path, "fsdp", **options)
    check(answers[0], whole("fsdp"), 2, None)
