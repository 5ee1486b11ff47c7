"""What hears of a run: its resumes, steps, saves and end, as its log does."""

from __future__ import annotations

from typing import Any

from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport


class RunListener:
    """Hears of what a run does. Made when the run is opened; every rank has the same listeners.

    All methods but `tell` and `join` are called by all ranks together, so they may agree.
    """

    def open_search(self, folder: RunFolder, verify: bool) -> StepSearch | None:
        """The search of a resume, where this listener knows of more steps than the folder's."""

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        """The run was resumed, or began.

        Args:
            report: of the resume; None where there was nothing.
            step: that was restored, if it was one of the run.

        Returns:
            The report, with what this listener knows besides.
        """
        return report

    def tell(self, number: int) -> Any:
        """What this rank tells the others of a step before it counts, in the run's agreement."""

    def join(self, news: Any, others: Any) -> Any:
        """Merge what ranks tell, in another thread; see `Ranks.run_and_reduce`."""
        return news

    def on_step(self, news: Any) -> None:
        """A step has counted.

        Args:
            news: what the ranks have told of it, merged.
        """

    def on_save(self) -> None:
        """A save has ended, or goes on in the background."""

    def on_close(self, error: BaseException | None) -> None:
        """The run is closed, by an error or without one."""
