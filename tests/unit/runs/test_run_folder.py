"""The run folder against the world: lost manifests, disks that fail, two writers, signals."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runs import resume
from torch import nn

import anyrank
from anyrank import faults
from anyrank.files.local import LocalFile
from anyrank.files.storage import LocalStorage, storage_for
from anyrank.runs.resume.signals import GRACE_SEC, WATCHED, PendingSignals
from anyrank.runs.saving.lock import RunLock
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.testing import RanksFailed, run_ranks
from anyrank.world.ranks import open_ranks

NEWEST, BEFORE = "step-00000002", "step-00000001"


def build() -> anyrank.TrainState:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    return anyrank.TrainState(net, torch.optim.SGD(net.parameters(), lr=0.1))


def saved_run(path: Path, steps: int = 2) -> anyrank.TrainState:
    """A run of one process with these steps."""
    state = build()
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        for _ in range(steps):
            ckpts.step_done()
    return state


def folders(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir())


@pytest.fixture
def bad_sectors(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ends of paths which a read now fails on, as on a failing disk."""
    ends: set[str] = set()
    paths: dict[int, str] = {}
    new, readv = LocalFile.__init__, LocalFile.readv

    def opened(self: LocalFile, path: str) -> None:
        new(self, path)
        paths[id(self)] = path

    def read(self: LocalFile, buffers: list[memoryview], offset: int) -> int:
        if any(paths[id(self)].endswith(end) for end in ends):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readv(self, buffers, offset)

    monkeypatch.setattr(LocalFile, "__init__", opened)
    monkeypatch.setattr(LocalFile, "readv", read)
    return ends


# -- a step that lost its manifest ----------------------------------------------------------------


def test_a_save_goes_past_a_step_that_lost_its_manifest(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    with anyrank.Checkpoints(tmp_path, build()) as ckpts:
        ckpts.resume()
        ckpts.step_done()
        shutil.copytree(tmp_path / BEFORE, tmp_path / NEWEST)
        (tmp_path / NEWEST / "anyrank.json").unlink()
        ckpts.save()
        assert [one.step for one in ckpts.saved()] == [2, 1]
    assert folders(tmp_path) == [f".aside-damaged-{NEWEST}", BEFORE, NEWEST]


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    saved_run(tmp_path)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000009").write_text("notes")
    report = resume(tmp_path, build())
    assert report is not None
    assert (report.step, report.lost_steps) == (2, 0)
    assert folders(tmp_path) == [BEFORE, NEWEST, "step-7"]


def test_damage_that_cannot_be_renamed_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path)
    (tmp_path / NEWEST / "tensors.json").write_text("")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(LocalStorage, "rename", refuse)
    words = (
        r"corrupt, and cannot be renamed \(\[Errno 30\] Read-only file system\)\. .* by its number"
    )
    with pytest.raises(anyrank.CheckpointError, match=words):
        resume(tmp_path, build())
    assert folders(tmp_path) == [BEFORE, NEWEST]


# -- a disk that does not hand out what it holds --------------------------------------------------


@pytest.mark.parametrize(("name", "verify"), [("anyrank.json", False), ("__0_0.distcp", True)])
def test_an_unreadable_step_is_an_error_that_names_it_and_stays(
    tmp_path: Path, bad_sectors: set[str], name: str, verify: Any
) -> None:
    saved_run(tmp_path)
    bad_sectors.add(f"{NEWEST}/{name}")
    with anyrank.Checkpoints(tmp_path, build(), verify=verify) as ckpts:
        for which in ("auto", 2):
            with pytest.raises(anyrank.CheckpointError, match="Input/output error") as asked:
                ckpts.resume(which)
            assert asked.type is anyrank.CheckpointError
            assert f"{NEWEST} may be undamaged, and was not renamed. Try again" in str(asked.value)
        assert folders(tmp_path) == [BEFORE, NEWEST]
        (tmp_path / NEWEST).rename(tmp_path / "elsewhere")
        report = ckpts.resume()
        assert report is not None
        assert (report.step, report.set_aside) == (1, [])


def test_a_run_that_cannot_be_read_takes_no_save(tmp_path: Path, bad_sectors: set[str]) -> None:
    saved_run(tmp_path)
    bad_sectors.add("anyrank.json")
    with anyrank.Checkpoints(tmp_path, build()) as ckpts:
        with pytest.raises(anyrank.CheckpointError, match="Input/output error"):
            ckpts.save()
        assert folders(tmp_path) == [BEFORE, NEWEST]
        bad_sectors.clear()
        assert ckpts.resume() is not None


@pytest.mark.parametrize("end", [f"{BEFORE}/anyrank.json", f"{BEFORE}/tensors.json"])
def test_an_unreadable_old_step_fails_no_save(
    tmp_path: Path, bad_sectors: set[str], end: str
) -> None:
    state = build()
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=2) as ckpts:
        ckpts.step_done()
        bad_sectors.add(end)
        for _ in range(2):
            ckpts.step_done()
        assert ckpts.latest() == f"{tmp_path}/step-00000003"
    assert len(folders(tmp_path)) == 2  # two good ones stay, and the first was not one of them


def test_retention_looks_at_one_older_step_and_only_to_remove_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    is_good = RunFolder._is_good

    def look(self: RunFolder, name: str) -> bool:
        looked.append(name)
        return is_good(self, name)

    monkeypatch.setattr(RunFolder, "_is_good", look)
    state = build()
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=3) as ckpts:
        for _ in range(3):
            ckpts.step_done()
        assert looked == []
        ckpts.step_done()
    assert looked == ["step-00000003"]  # the newest was just committed
    assert folders(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_resume_reads_each_small_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path)
    opened: list[str] = []
    new = LocalFile.__init__

    def record(self: LocalFile, path: str) -> None:
        opened.append(os.path.basename(path))
        new(self, path)

    monkeypatch.setattr(LocalFile, "__init__", record)
    resume(tmp_path, build())
    small = [name for name in opened if not name.endswith((".distcp", ".xxh3"))]
    assert sorted(small) == ["__0_0.json", "anyrank.json", "tensors.json"]


def test_a_failing_clean_up_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = build()
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=2) as ckpts:
        ckpts.step_done()

        def refuse(*_: Any) -> None:
            raise anyrank.LoadError("no")

        monkeypatch.setattr(RunFolder, "_write_latest", refuse)
        ckpts.step_done()
        assert ckpts.latest() == f"{tmp_path}/step-00000002"
    assert "old steps could not be removed: no" in caplog.text


# -- the manifest ---------------------------------------------------------------------------------


# -- signals --------------------------------------------------------------------------------------


@pytest.fixture
def wishes() -> Iterator[tuple[PendingSignals, list[int]]]:
    """PendingSignals that watch, and what reaches the handlers that were there before."""
    for left in [*PendingSignals.open_runs]:  # by a test of this process that closed no run
        left.restore()
    reached: list[int] = []
    before = {one: signal.signal(one, lambda n, _: reached.append(n)) for one in WATCHED}
    made = PendingSignals()
    made.watch()
    yield made, reached
    made.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", WATCHED)
def test_sigusr1_never_replaces_a_sigterm(
    wishes: tuple[PendingSignals, list[int]], first: signal.Signals
) -> None:
    for number in (first, *(one for one in WATCHED if one != first)):
        signal.raise_signal(number)
    assert wishes[0].find_pending() == signal.SIGTERM
    wishes[0].mark_done({signal.SIGTERM})
    assert wishes[0].find_pending() is None  # both asked for the save that has followed


@pytest.mark.parametrize("taken", [False, True])
def test_a_second_sigterm_counts_after_a_grace_time(
    wishes: tuple[PendingSignals, list[int]], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reached = wishes
    for _ in range(2):  # of a scheduler, and of torchrun
        signal.raise_signal(signal.SIGTERM)
        if taken:
            made.mark_done({made.find_pending()})
    assert reached == []
    later = time.monotonic() + GRACE_SEC
    monkeypatch.setattr(time, "monotonic", lambda: later)
    signal.raise_signal(signal.SIGTERM)
    assert reached == [signal.SIGTERM]


def test_a_sigterm_during_the_save_that_sigusr1_asked_for_is_still_pending(
    wishes: tuple[PendingSignals, list[int]],
) -> None:
    signal.raise_signal(signal.SIGUSR1)
    asked = wishes[0].find_pending()
    signal.raise_signal(signal.SIGTERM)  # while it is saved
    wishes[0].mark_done({asked})
    assert wishes[0].find_pending() == signal.SIGTERM


def test_another_ranks_sigterm_is_this_ones_too(wishes: tuple[PendingSignals, list[int]]) -> None:
    made, reached = wishes
    made.mark_done({None, signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)  # a scheduler sends it to each rank, moments apart
    made.restore()
    made.resend()
    assert reached == []


def test_each_open_run_notes_a_signal_in_whatever_order_they_end(
    wishes: tuple[PendingSignals, list[int]],
) -> None:
    first, reached = wishes
    second, dropped = PendingSignals(), PendingSignals()
    second.watch()
    dropped.watch()
    del dropped
    signal.raise_signal(signal.SIGTERM)
    assert (first.find_pending(), second.find_pending()) == (signal.SIGTERM, signal.SIGTERM)
    for run in (first, second):
        run.mark_done({signal.SIGTERM})
    first.restore()
    signal.raise_signal(signal.SIGUSR1)
    assert (first.find_pending(), second.find_pending()) == (None, signal.SIGUSR1)
    second.restore()
    signal.raise_signal(signal.SIGUSR1)
    assert reached == [signal.SIGUSR1]


def test_with_no_run_left_a_signal_goes_where_it_would_have_gone(
    wishes: tuple[PendingSignals, list[int]],
) -> None:
    made, reached = wishes
    PendingSignals.open_runs.discard(made)  # as of a run that was dropped without being closed
    signal.raise_signal(signal.SIGTERM)
    assert reached == [signal.SIGTERM]


# -- the lock -------------------------------------------------------------------------------------


def try_lock(path: str) -> str:
    """What a process is told that wants the lock; "" if it gets it."""
    lock = RunLock(LocalStorage(), path)
    try:
        lock.take()
    except anyrank.CheckpointError as error:
        return str(error)
    lock.release()
    return ""


def in_a_child(path: Path) -> str:
    """What a process is told that this one forks, which has all files that this one has open."""
    receiving, sending = os.pipe()
    if os.fork() == 0:
        os.write(sending, try_lock(str(path)).encode() or b"got it")
        os._exit(0)
    os.close(sending)
    with open(receiving, encoding="utf-8") as file:
        text = file.read()
    os.wait()
    return text


def test_another_live_process_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    lock = RunLock(LocalStorage(), str(tmp_path))
    for _ in range(2):
        lock.take()
        for text in (in_a_child(tmp_path), *run_ranks(1, try_lock, str(tmp_path), init=False)):
            assert (
                f"writing to this folder (process {os.getpid()} on {socket.gethostname()} since"
                in text
            )
    lock.release()
    assert os.listdir(tmp_path) == []
    assert in_a_child(tmp_path) == "got it"


def job_killed_beside_a_worker(path: str) -> None:
    """A rank that dies by SIGKILL, with a worker that lives on and has its open files."""
    anyrank.Checkpoints(path, build()).save()
    if os.fork() == 0:
        os.setpgid(0, 0)  # else the pool kills it too
        Path(path, "worker").write_text(str(os.getpid()))
        time.sleep(300)
    while not Path(path, "worker").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_of_a_killed_rank_is_free_at_once_though_its_worker_lives(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(1, job_killed_beside_a_worker, str(tmp_path), init=False)
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, 0)
    assert "since" in (tmp_path / ".lock").read_text()
    assert try_lock(str(tmp_path)) == ""
    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("how", ["copied", "removed", "all removed"])
def test_a_lock_that_was_let_go_is_taken_again_at_the_next_save(tmp_path: Path, how: str) -> None:
    with closing(anyrank.Checkpoints(tmp_path / "run", build(), every=1)) as ckpts:
        for _ in range(2):
            ckpts.step_done()
            assert "another run is writing to this folder" in in_a_child(tmp_path / "run")
            if how == "copied":  # which opens and closes the file
                shutil.copytree(tmp_path / "run", tmp_path / "copy", dirs_exist_ok=True)
                assert "another run is writing to this folder" in in_a_child(tmp_path / "run")
            elif how == "removed":
                (tmp_path / "run" / ".lock").unlink()
            else:
                shutil.rmtree(tmp_path / "run")


def wait_for(path: Path, other: Future[Any]) -> None:
    """Until another rank has made a file; raises its error if it has failed."""
    while not path.exists():
        assert not other.done(), other.exception()
        time.sleep(0.01)


def job_hold(path: str) -> None:
    """Hold the lock until the folder has a file `end`, or for a minute."""
    lock = RunLock(LocalStorage(), path)
    lock.take()
    Path(path, "held").touch()
    until = time.monotonic() + 60
    while not Path(path, "end").exists() and time.monotonic() < until:
        time.sleep(0.01)
    lock.release()


def test_a_run_whose_lock_another_has_taken_since_saves_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpts = anyrank.Checkpoints(tmp_path, build())
    ckpts.step_done()
    ckpts.save()
    (tmp_path / ".lock").unlink()  # as by a user
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(run_ranks, 1, job_hold, str(tmp_path), init=False)
        wait_for(tmp_path / "held", other)
        ckpts.step_done()
        for _ in range(2):
            with pytest.raises(
                anyrank.CheckpointError, match=r"another run is writing to this folder \(process"
            ):
                ckpts.save()
        ckpts.close()
        assert (tmp_path / ".lock").exists()
        (tmp_path / "end").touch()
        other.result(60)
    assert [one.step for one in ckpts.saved()] == [1]
    assert not (tmp_path / ".lock").exists()


def job_late(path: str) -> str:
    """Take the lock of a file that its owner removes once it is open here; what others are told."""
    opened = os.open

    def slow(*given: Any) -> int:
        descriptor = opened(*given)
        os.open = opened
        Path(path, "came").touch()
        while Path(path, ".lock").exists():
            time.sleep(0.01)
        return descriptor

    os.open = slow
    lock = RunLock(LocalStorage(), path)
    lock.take()
    told = in_a_child(Path(path))
    lock.release()
    return told


def test_a_lock_that_is_removed_while_another_takes_it_is_not_taken(tmp_path: Path) -> None:
    lock = RunLock(LocalStorage(), str(tmp_path))
    lock.take()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(run_ranks, 1, job_late, str(tmp_path), init=False)
        wait_for(tmp_path / "came", other)
        lock.release()
        assert "another run is writing to this folder" in other.result(60)[0]


def test_a_disk_without_locks_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with anyrank.Checkpoints(tmp_path, build(), every=1) as ckpts:
        for _ in range(2):
            ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [2, 1]
    assert caplog.text.count("this file system does not support locks (No locks available)") == 1
    assert not (tmp_path / ".lock").exists()


def test_a_name_that_does_not_fit_on_the_disk_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = RunLock(LocalStorage(), str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(anyrank.CheckpointError, match="No space left"):
            lock.take()
    assert in_a_child(tmp_path) == "got it"


def test_an_object_store_has_no_lock(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    for _ in range(2):
        RunLock(storage_for(url), url).take()
    assert storage_for(url).names(url) == []


# -- what dead saves leave, and what a power cut takes --------------------------------------------


def test_a_first_save_cleans_up_after_all_that_failed(tmp_path: Path) -> None:
    state = build()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        for _ in range(2):
            faults.armed["save.commit"] = lambda: (_ for _ in ()).throw(OSError("gone"))
            try:
                with pytest.raises((anyrank.AnyrankError, OSError)):
                    ckpts.save()
            finally:
                faults.armed.clear()
            assert len(folders(tmp_path)) == 1
        ckpts.save()
        assert folders(tmp_path) == ["step-00000000"]
        foreign = "step-00000001.tmp-0123abcd-0123abcd"
        mine = f"step-00000001.tmp-{(state.run or '')[:8]}-0123abcd"
        for name in (foreign, mine):
            (tmp_path / name).mkdir()
        ckpts.step_done()
        ckpts.save()
    assert folders(tmp_path) == ["step-00000000", BEFORE, foreign]


def test_each_new_folder_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/a/b/c", f"{tmp_path}/a/b/c/", "a/b/d/", "e"):
        LocalStorage().make_folder(path)
    assert synced == [str(tmp_path / one) for one in ("", "a", "a/b", "a/b", "")]
    (tmp_path / "file").write_text("")
    for path, kind in (("file", FileExistsError), ("file/a", NotADirectoryError)):
        with pytest.raises(kind):
            LocalStorage().make_folder(path)


def test_a_folder_that_cannot_be_made_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(anyrank.CheckpointError, match=f"because {tmp_path}/file is a file. Pass"):
        resume(tmp_path / "file" / "run", build())
    # For root the system's own answer is always yes.
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(anyrank.CheckpointError, match=rf"this user may not write in {tmp_path}\."):
        resume(tmp_path / "a" / "run", build())
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_told_that_the_folder_cannot_be_made(tmp_path: Path) -> None:
    resume(tmp_path / "run", build())  # which imports what nobody may not read
    nobody, path = 65534, "/anyrank-test"
    os.setresuid(nobody, nobody, 0)
    try:
        with pytest.raises(anyrank.CheckpointError, match=r"this user may not write in /\. "):
            resume(path, build())
    finally:
        os.setresuid(0, 0, 0)
    assert not os.path.exists(path)


# -- the ranks ------------------------------------------------------------------------------------


def job_destroy(path: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    with open_ranks(), anyrank.Checkpoints(path, build()) as ckpts:
        ckpts.save()
        dist.destroy_process_group()
    logging.getLogger().removeHandler(handler)
    return told


def test_who_destroys_the_groups_first_is_told_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, job_destroy, str(tmp_path)) == [[], []]
    assert capfd.readouterr().err == ""
    assert not (tmp_path / ".lock").exists()
