"""A run that begins with a step of another run, or with what another tool saved."""

from __future__ import annotations

from anyrank.files.storage import storage_for
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.restore import restore_state
from anyrank.runs.resume.resume import restore_newest
from anyrank.runs.resume.search import StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.world.ranks import Ranks


def begin_with(
    path: str,
    step: tuple[str, int] | None,
    state: TrainState,
    arguments: ResumeArguments,
    verify: bool,
    ranks: Ranks,
) -> ResumeReport:
    """Begin a run with a step of another run, or with what another tool saved. All ranks."""
    if step is None:
        from anyrank.runs.adopt.adopt import adopt  # around the core: a door in test_house

        return restore_state(state, adopt(state, path, arguments, ranks), arguments, ranks)
    run_path, number = step
    other_run = RunFolder(storage_for(run_path), run_path)
    search = StepSearch(other_run, number, verify, ranks)  # of a number: sets nothing aside
    resumed = restore_newest(state, search, arguments, ranks)
    assert resumed is not None
    state.run = None  # a new run begins
    return resumed.report
