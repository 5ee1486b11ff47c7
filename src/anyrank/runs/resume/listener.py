"""The interface for listeners of a run, such as its log: resumes, steps, saves and the end."""

from __future__ import annotations

from typing import Any

from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport


class RunListener:
    """Listener of a run. Made when the run is opened; every rank has the same listeners.

    Every rank calls all methods but `tell` and `join` together, so these may agree.
    """

    def open_search(self, folder: RunFolder, verify: bool) -> StepSearch | None:
        """Open the search of a resume if this listener knows of more steps than the folder has."""

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        """Handle a resume, or the start of a run.

        Args:
            report: report of the resume; None if there was nothing to resume.
            step: step that was restored, if it was one of the run.

        Returns:
            The report, with the additions of this listener.
        """
        return report

    def tell(self, number: int) -> Any:
        """Return what this rank tells the others about a step before it counts."""

    def join(self, news: Any, others: Any) -> Any:
        """Merge the reports of ranks, in another thread; see `Ranks.run_and_reduce`."""
        return news

    def on_step(self, news: Any) -> None:
        """Handle a counted step.

        Args:
            news: what the ranks have reported about it, merged.
        """

    def on_save(self) -> None:
        """Handle the end of a save, or its continuation in the background."""

    def on_close(self, error: BaseException | None) -> None:
        """Handle the end of the run, by an error or without one."""
