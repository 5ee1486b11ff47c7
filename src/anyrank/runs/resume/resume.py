"""`Checkpoints.resume`: the run's own newest step, or a checkpoint that starts the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.storage import storage_for
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.path import agree_on_path
from anyrank.runs.resume.restore import restore_state
from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.world.ranks import Ranks


class Resumed(NamedTuple):
    """The result of a resume.

    Attributes:
        report: report for the caller.
        step: step that was restored, if it is one of this run.
        is_branch: whether the caller passed the step's number, so that newer ones may exist.
    """

    report: ResumeReport
    step: StepOfRun | None = None
    is_branch: bool = False


def resume_run(
    state: TrainState,
    folder: RunFolder,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
    open_search: Callable[[RunFolder, bool, Ranks], StepSearch],
) -> Resumed | None:
    """Restore a state; return None if there is nothing to resume. Collective.

    Args:
        state, folder: state and folder of the run.
        arguments, verify: arguments of the caller.
        ranks: ranks of the run.
        open_search: opens the search for the newest step.

    Raises:
        ValueError: a path leads to no step, or `rename` was passed with a run's path.
        CheckpointError: "must" was passed and there is no checkpoint; see `Checkpoints.resume`.
    """
    path, which = arguments.path, arguments.which
    target = None if path is None else agree_on_path(path, folder, arguments, ranks)
    if target is not None and target.own_step is not None:
        path, which = None, target.own_step
    number = which if path is None and isinstance(which, int) else None
    # skip= was meant for the first resume, from the path: the run's own steps have all parts.
    own_arguments = arguments if path is None else replace(arguments, skip=())
    # A step that is requested by its number is read from the folder, and its files stay.
    search = (
        open_search(folder, verify, ranks)
        if number is None
        else StepSearch(folder, number, verify, ranks)
    )
    resumed = _restore_newest(state, search, own_arguments, ranks)
    if resumed is not None and path is not None:
        note = f"{path} was ignored because this run already has steps; it resumes its newest step"
        note += ", with all parts of the state" if arguments.skip else ""
        report = resumed.report
        resumed = resumed._replace(report=replace(report, notes=[*report.notes, note]))
    elif resumed is None and path is not None and target is not None:
        resumed = Resumed(_begin_with(path, target.step, state, arguments, verify, ranks))
    elif resumed is None and which == "must":
        raise CheckpointError(
            f"{folder.path}: has no checkpoint to resume. Check the path; to start a new run "
            "instead, call resume('auto')."
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
    """Start a run from a step of another run, or from another tool's checkpoint. Collective."""
    if step is None:
        from anyrank.runs.adopt.adopt import adopt

        return restore_state(state, adopt(state.parts, path, arguments, ranks), arguments, ranks)
    run_path, number = step
    other_run = RunFolder(storage_for(run_path), run_path)
    search = StepSearch(other_run, number, verify, ranks)  # by number, so it sets nothing aside
    resumed = _restore_newest(state, search, arguments, ranks)
    assert resumed is not None
    state.run = None  # a new run starts
    return resumed.report


def _restore_newest(
    state: TrainState, search: StepSearch, arguments: ResumeArguments, ranks: Ranks
) -> Resumed | None:
    """Restore the newest complete step; return None if the run has no steps. Collective.

    Raises:
        CheckpointError: the step does not match the state, or reading it failed.
    """
    while (step := search.next()) is not None:
        try:
            report = restore_state(state, step, arguments, ranks)
            return Resumed(report, step, search.number is not None)
        except CorruptCheckpoint as error:
            search.reject(step.candidate, str(error))
    return None
