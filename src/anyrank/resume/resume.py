"""`Checkpoints.resume`: the run's own newest step, or a checkpoint that begins the run."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.storage import reading, storage_for
from anyrank.formats.run_folder import is_step, number_of
from anyrank.resume.options import RENAMED, ResumeArguments
from anyrank.resume.restore import restore_state
from anyrank.resume.search import StepSearch
from anyrank.saving.run_store import RunFolder
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState
from anyrank.world.ranks import Ranks

if TYPE_CHECKING:
    from anyrank.resume.search import PeerMemory


class Resumed(NamedTuple):
    """What a resume did.

    Attributes:
        report: for the caller.
        is_on_disk: whether it was a step of this run, in files.
        is_branch: whether it was asked for, so that newer ones are left.
        snapshot: name of the snapshot in memory that it was, or None.
    """

    report: ResumeReport
    is_on_disk: bool = False
    is_branch: bool = False
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
    resumed = _resume(state, folder, arguments, verify, ranks, memory)
    if resumed is not None and memory is not None:
        memory.remove_but(*filter(None, [resumed.snapshot]))
    return resumed


def _resume(
    state: TrainState,
    folder: RunFolder,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
    memory: PeerMemory | None,
) -> Resumed | None:
    path, which = arguments.path, arguments.which
    meant = None if path is None else _agree_on_path(path, folder, arguments, ranks)
    if meant is not None and meant.own is not None:
        path, which = None, meant.own
    own = "auto" if path is not None or isinstance(which, os.PathLike) else which
    # What skip= leaves out of a beginning, the own steps of the run have.
    for_own = arguments if path is None else replace(arguments, skip=())
    resumed = _newest(state, StepSearch(folder, own, verify, ranks, memory), for_own, ranks)
    if resumed is not None:
        if path is None:
            return resumed
        note = f"{path} was not read: the run has steps of its own, which go on from it"
        note += ", with all parts of the state" if arguments.skip else ""
        report = resumed.report
        return resumed._replace(report=replace(report, notes=[*report.notes, note]))
    if meant is not None and meant.step is not None:
        place, number = meant.step
        other = RunFolder(storage_for(place), place)
        search = StepSearch(other, number, verify, ranks)  # a given step, so nothing is set aside
        begun = _newest(state, search, arguments, ranks)
        assert begun is not None
        state.run = None  # a run of its own, which begins here
        return Resumed(begun.report)
    if path is not None:
        from anyrank.foreign.adopt import adopt  # around the core: a door in test_house

        return Resumed(restore_state(state, adopt(state, path, arguments, ranks), arguments, ranks))
    if which == "must":
        raise CheckpointError(
            f"{folder.path}: holds no checkpoint, and resume('must') never starts anew: "
            "check the path, or use 'auto'"
        )
    return None


def _newest(
    state: TrainState, search: StepSearch, arguments: ResumeArguments, ranks: Ranks
) -> Resumed | None:
    """Restore the newest step that is whole; None where the run has none. All ranks.

    Raises:
        CheckpointError: the step does not match the state, or reading it failed.
    """
    while (step := search.next()) is not None:
        try:
            report = restore_state(state, step, arguments, ranks)
            snapshot = None if step.memory is None else step.candidate.name
            return Resumed(report, snapshot is None, isinstance(search.which, int), snapshot)
        except CorruptCheckpoint as error:
            search.reject(step, error)
    return None


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
