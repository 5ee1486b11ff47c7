"""`Checkpoints.resume`: the run's own newest step, or a checkpoint that begins the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError
from anyrank.files.storage import absolute
from anyrank.files.store import reading, store_for
from anyrank.formats.run_folder import is_step, steps_of
from anyrank.resume.adopt import adopt
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
    verify: str,
    ranks: Ranks,
    memory: PeerMemory | None = None,
) -> Resumed | None:
    """Restore a state; None where there is nothing to resume. All ranks.

    Raises:
        CheckpointError: there is nothing and there must be; or see `Checkpoints.resume`.
    """
    which, path = arguments.which, arguments.path
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
        leaves_newer = isinstance(which, int) or bool(resuming.found.left)
        resumed = _resumed(resuming, report, ranks, held is None, leaves_newer)
        return replace(resumed, snapshot=None if held is None else held.name)
    if path is not None:
        return _from_elsewhere(state, folder, path, arguments, verify, ranks)
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
    arguments: ResumeArguments,
    verify: str,
    ranks: Ranks,
) -> Resumed:
    """Begin this run with a step of another one, or with another tool's checkpoint. All ranks."""
    found = ranks.from_one("looking at the checkpoint", lambda: _step_of_a_run(path))
    if found is None:
        resuming = adopt(state, path, arguments, ranks)
        return _resumed(resuming, resuming.report(folder, verify), ranks)
    if arguments.rename is not None:
        raise ValueError(
            f"rename= is for another tool's checkpoint, and {path} is a run's; {RENAMED}"
        )
    other = RunFolder(store_for(found[0]), found[0])
    search = StepSearch(other, found[1], verify, ranks)  # a given step, so nothing is renamed
    resuming = resume_newest(state, search, ranks, arguments)
    assert resuming is not None
    state.run = None  # a run of its own, which begins here
    return _resumed(resuming, resuming.report(other, verify), ranks)


def _step_of_a_run(path: str) -> tuple[str, int] | None:
    """Folder of a run, and step, that a path means; None for another tool's. One rank."""
    path = path.rstrip("/")
    run = RunFolder(store_for(path), path)
    with reading(path):
        is_one = is_step(run.store, path)
    if is_one:
        parent, _, name = absolute(path).rpartition("/")
        steps = steps_of([name])
        if not steps:
            raise CheckpointError(f"{path}: is a step of a run that was renamed: name it step-N")
        return parent, steps[0][0]
    steps = run.committed()
    return (path, steps[0][0]) if steps else None


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
