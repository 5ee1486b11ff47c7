"""`Checkpoints.resume`: the run's own newest step, or a checkpoint that begins the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

from anyrank.errors import CheckpointError
from anyrank.files.storage import reading, storage_for
from anyrank.formats.run_folder import is_step, number_of
from anyrank.resume.options import RENAMED, ResumeArguments
from anyrank.resume.restore import Resuming, log_report, resume_newest
from anyrank.resume.select_step import StepSearch
from anyrank.saving.peers import PeerMemory
from anyrank.saving.run_store import RunFolder
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState
from anyrank.world.ranks import Ranks


@dataclass(frozen=True)
class Resumed:
    """What a resume left.

    Attributes:
        report: for the caller.
        is_own: whether the state is a step of this run, and on disk.
        snapshot: name of the snapshot in memory that the state came from, or None.
        branch: the step that newer ones of the run are set aside for at the next save, or None.
    """

    report: ResumeReport
    is_own: bool
    branch: int | None
    snapshot: str | None = None


def resume_run(
    state: TrainState,
    folder: RunFolder,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
    memory: PeerMemory | None = None,
) -> Resumed | None:
    """Restore a state; None where there is nothing to resume. All ranks.

    Raises:
        ValueError: a path where nothing is, or `rename` with a run's path.
        CheckpointError: there is nothing and there must be; or see `Checkpoints.resume`.
    """
    path, which = arguments.path, arguments.which
    meant = None if path is None else _agree_on_path(path, folder, arguments, ranks)
    if meant is not None and meant.own is not None:
        path, which = None, meant.own
    own = "auto" if path is not None or isinstance(which, os.PathLike) else which
    search = StepSearch(folder, own, verify, ranks, memory)
    began = path is not None  # this run is past it, and so past its skip= as well
    resuming = resume_newest(state, search, ranks, arguments, began=began)
    if resuming is not None:
        held, there = resuming.found.candidate.held, resuming.found.memory
        report = resuming.report(folder if there is None else there.folder, verify)
        if path is not None:
            note = f"{path} was not read: the run has steps of its own, which go on from it"
            note += ", with all parts of the state" if arguments.skip else ""
            report = replace(report, notes=[*report.notes, note])
        leaves_newer = isinstance(which, int)
        resumed = _resumed(resuming, report, ranks, held is None, leaves_newer)
        return replace(resumed, snapshot=None if held is None else held.name)
    if path is not None and meant is not None:
        return _from_elsewhere(state, folder, path, meant.step, arguments, verify, ranks)
    if which == "must":
        raise CheckpointError(
            f"{folder.path}: holds no checkpoint, and resume('must') never starts anew: "
            "check the path, or use 'auto'"
        )
    return None


def _from_elsewhere(
    state: TrainState,
    folder: RunFolder,
    path: str,
    found: tuple[str, int] | None,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
) -> Resumed:
    """Begin this run with a step of another one, or with another tool's checkpoint. All ranks."""
    if found is None:
        from anyrank.foreign.adopt import adopt  # around the core: a door in test_house

        resuming = adopt(state, path, arguments, ranks)
        return _resumed(resuming, resuming.report(folder, verify), ranks)
    other = RunFolder(storage_for(found[0]), found[0])
    search = StepSearch(other, found[1], verify, ranks)  # a given step, so nothing is renamed
    resuming = resume_newest(state, search, ranks, arguments)
    assert resuming is not None
    state.run = None  # a run of its own, which begins here
    return _resumed(resuming, resuming.report(other, verify), ranks)


class _Meant(NamedTuple):
    """What a path means: a step of this run (`own`), one of another run, or neither.

    Attributes:
        own: "must" for the run's own folder, or a number of one of its steps.
        step: of another run: its folder, and the number.
        problem: why there is nothing to resume, in words.
    """

    own: str | int | None = None
    step: tuple[str, int] | None = None
    problem: str | None = None


def _agree_on_path(
    path: str, folder: RunFolder, arguments: ResumeArguments, ranks: Ranks
) -> _Meant:
    """What a path means. All ranks.

    Raises:
        ValueError: nothing is there, or `rename` with a run's path.
    """
    meant = ranks.from_one("looking at the path", lambda: _meant_by(path, folder))
    if meant.problem:
        raise ValueError(meant.problem)
    if arguments.rename is not None and (meant.own is not None or meant.step is not None):
        raise ValueError(
            f"rename= is for another tool's checkpoint, and {path} is a run's; {RENAMED}"
        )
    return meant


def _meant_by(path: str, folder: RunFolder) -> _Meant:
    """What there is at a path. One rank."""
    path = path.rstrip("/")
    run = RunFolder(storage_for(path), path)
    with reading(path):
        if not run.store.is_file(path) and not run.store.is_dir(path):
            return _Meant(problem=_nothing_there(path, folder))
        is_one = is_step(run.store, path)
    parent, _, name = _resolved(path).rpartition("/")
    number = number_of(name)
    if _resolved(path) == _resolved(folder.path):
        return _Meant(own="must")
    if number is not None and parent == _resolved(folder.path):
        return _Meant(own=number)
    if is_one and number is None:
        raise CheckpointError(f"{path}: is a step of a run that was renamed: name it step-N")
    if is_one and number is not None:
        return _Meant(step=(parent, number))
    steps = run.whole()
    return _Meant(step=(path, steps[0].number) if steps else None)


def _nothing_there(path: str, folder: RunFolder) -> str:
    """What is wrong with a path that means nothing."""
    where = "" if "://" in path else f" (working directory {os.getcwd()})"
    steps = ", ".join(str(step.number) for step in folder.whole()[:10]) or "none"
    return (
        f"resume({path!r}): is not 'auto', not 'must', and no path that is there{where}; a step is "
        f"given as a number, of those that {folder.path} has: {steps}"
    )


def _resolved(path: str) -> str:
    """A path by which one folder is known, however it is written."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _resumed(
    resuming: Resuming,
    report: ResumeReport,
    ranks: Ranks,
    is_own: bool = False,
    leaves_newer: bool = False,
) -> Resumed:
    if ranks.index == 0:
        log_report(report, resuming.found.manifest.differed)
    return Resumed(report, is_own, report.step if leaves_newer else None)
