"""The interface for listeners of a run, such as its log: resumes, steps, saves and the end."""

from __future__ import annotations

from typing import Any

from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport


class RunListener:
    """Listens to a run. Made when the run is opened; every rank has the same listeners.

    All ranks call all methods but `tell` and `join` together, so these may agree.
    """

    def open_search(self, folder: RunFolder, verify: bool) -> StepSearch | None:
        """Open the search of a resume, if this listener knows of more steps than the folder's."""

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        """Hear that the run was resumed, or began.

        Args:
            report: report of the resume; None if there was nothing to resume.
            step: step that was restored, if it was one of the run.

        Returns:
            The report, with what this listener adds.
        """
        return report

    def tell(self, number: int) -> Any:
        """Return what this rank tells the others of a step before it counts, in the agreement."""

    def join(self, news: Any, others: Any) -> Any:
        """Merge what ranks tell, in another thread; see `Ranks.run_and_reduce`."""
        return news

    def on_step(self, news: Any) -> None:
        """Hear that a step has counted.

        Args:
            news: what the ranks have told of it, merged.
        """

    def on_save(self) -> None:
        """Hear that a save has ended, or continues in the background."""

    def on_close(self, error: BaseException | None) -> None:
        """Hear that the run is closed, by an error or without one."""
