"""`Checkpoints.resume`: the run's own newest step, or a checkpoint that begins the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.storage import reading, storage_for
from anyrank.formats.run_folder import ASIDE, is_step, number_of
from anyrank.resume.listener import OfferedStep
from anyrank.resume.options import RENAMING, ResumeArguments
from anyrank.resume.restore import restore_state
from anyrank.resume.search import StepSearch
from anyrank.saving.run_folder import RunFolder
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState
from anyrank.wording import join_first
from anyrank.world.ranks import Ranks

SHOWN = 8  # names in an error


class Resumed(NamedTuple):
    """The result of a resume.

    Attributes:
        report: for the caller.
        is_on_disk: whether the step is one of this run, in files.
        is_branch: whether the caller gave the step's number, so that there may be newer ones.
        offered: the step that was restored, if a listener has offered it.
    """

    report: ResumeReport
    is_on_disk: bool = False
    is_branch: bool = False
    offered: OfferedStep | None = None


def resume_run(
    state: TrainState,
    folder: RunFolder,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
    offers: Sequence[OfferedStep],
) -> Resumed | None:
    """Restore a state; None if there is nothing to resume. All ranks.

    Raises:
        ValueError: a path that leads to no step, or `rename` with a run's path.
        CheckpointError: "must" and no checkpoint; or see `Checkpoints.resume`.
    """
    path, which = arguments.path, arguments.which
    target = None if path is None else _agree_on_path(path, folder, arguments, ranks)
    if target is not None and target.own_step is not None:
        path, which = None, target.own_step
    number = which if path is None and isinstance(which, int) else None
    # skip= was for the first resume, from the path: the run's own steps have all parts.
    own_arguments = arguments if path is None else replace(arguments, skip=())
    search = StepSearch(folder, number, verify, ranks, offers)
    resumed = _restore_newest(state, search, own_arguments, ranks)
    if resumed is not None and path is not None:
        note = f"{path} was not read: the run has steps of its own, and goes on with them"
        note += ", with all parts of the state" if arguments.skip else ""
        report = resumed.report
        resumed = resumed._replace(report=replace(report, notes=[*report.notes, note]))
    elif resumed is None and path is not None and target is not None:
        resumed = Resumed(_begin_with(path, target.step, state, arguments, verify, ranks))
    elif resumed is None and which == "must":
        raise CheckpointError(
            f"{folder.path}: holds no checkpoint, and resume({arguments.path or 'must'!r}) never "
            "starts anew: check the path, or use 'auto'"
        )
    return resumed


def _begin_with(
    path: str,
    step: tuple[str, int] | None,
    state: TrainState,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
) -> ResumeReport:
    """Begin a run with a step of another run, or with what another tool saved. All ranks."""
    if step is None:
        from anyrank.around.foreign.adopt import adopt  # around the core: a door in test_house

        return restore_state(state, adopt(state, path, arguments, ranks), arguments, ranks)
    run_path, number = step
    other_run = RunFolder(storage_for(run_path), run_path)
    search = StepSearch(other_run, number, verify, ranks)  # of a number: sets nothing aside
    resumed = _restore_newest(state, search, arguments, ranks)
    assert resumed is not None
    state.run = None  # a new run begins
    return resumed.report


def _restore_newest(
    state: TrainState, search: StepSearch, arguments: ResumeArguments, ranks: Ranks
) -> Resumed | None:
    """Restore the newest step that is whole; None if the run has no steps. All ranks.

    Raises:
        CheckpointError: the step does not match the state, or reading it failed.
    """
    while (step := search.next()) is not None:
        try:
            report = restore_state(state, step, arguments, ranks)
            offered = step.candidate.offered
            return Resumed(report, offered is None, search.number is not None, offered)
        except CorruptCheckpoint as error:
            search.reject(step.candidate, str(error))
    return None


class _PathTarget(NamedTuple):
    """What a path is: a step of this run, one of another run, or neither.

    Attributes:
        own_step: "must" for this run's folder, or the number of one of its steps.
        step: another run's folder, and the number of a step.
        problem: an error's text if there is nothing to resume.
    """

    own_step: str | int | None = None
    step: tuple[str, int] | None = None
    problem: str | None = None


def _agree_on_path(
    path: str, folder: RunFolder, arguments: ResumeArguments, ranks: Ranks
) -> _PathTarget:
    """What a path is. All ranks.

    Raises:
        ValueError: it leads to no step, or `rename` with a run's path.
    """
    target = ranks.run_on_one("looking at the path", lambda: _find_target(path, folder))
    if target.problem:
        raise ValueError(target.problem)
    foreign = [
        name for name in ("rename", "parts", "epoch") if getattr(arguments, name) is not None
    ]
    if foreign and (target.own_step is not None or target.step is not None):
        way_out = f"; {RENAMING}" if foreign == ["rename"] else ": leave it out"
        raise ValueError(
            f"{foreign[0]}= is for another tool's checkpoint, and {path} is a run's{way_out}"
        )
    return target


def _find_target(path: str, folder: RunFolder) -> _PathTarget:
    """What a path is. One rank."""
    path = path.rstrip("/")
    run = RunFolder(storage_for(path), path)
    with reading(path):
        if not run.store.is_file(path) and not run.store.is_dir(path):
            return _PathTarget(problem=_no_step_text(path, folder, "no path that exists"))
        is_run_step = is_step(run.store, path)
    own_path, resolved = _resolve(folder.path), _resolve(path)
    if resolved == own_path:
        return _PathTarget(own_step="must")
    if resolved.startswith(f"{own_path}/"):
        first_name = resolved.removeprefix(f"{own_path}/").partition("/")[0]
        number = number_of(first_name)
        if number is not None:
            return _PathTarget(own_step=number)
        if first_name.startswith(ASIDE) or run.store.is_file(folder.join(first_name)):
            return _PathTarget(problem=_no_step_text(path, folder, "no step of the run"))
    parent, _, name = resolved.rpartition("/")
    number = number_of(name)
    if is_run_step and number is None:
        raise CheckpointError(f"{path}: is a step of a run that was renamed: name it step-N")
    if is_run_step and number is not None:
        return _PathTarget(step=(parent, number))
    steps = run.whole_steps()
    return _PathTarget(step=(path, steps[0].number) if steps else None)


def _no_step_text(path: str, folder: RunFolder, problem: str) -> str:
    """An error's text for a path that leads to no step."""
    directory = "" if "://" in path else f" (working directory {os.getcwd()})"
    steps = ", ".join(str(step.number) for step in folder.whole_steps()[:10]) or "none"
    text = (
        f"resume({path!r}): is not 'auto', not 'must', and {problem}{directory}; give a "
        f"step as a number, of those that {folder.path} has: {steps}"
    )
    store, parent = storage_for(path), path.rpartition("/")[0]
    own_path = _resolve(folder.path)  # whose steps are named already
    if parent not in ("", ".") and store.is_dir(parent) and _resolve(parent) != own_path:
        text += (
            f"; or a path, of those in {parent}: {join_first(sorted(store.names(parent)), SHOWN)}"
        )
    return text


def _resolve(path: str) -> str:
    """The one path of a folder, however it is written."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
