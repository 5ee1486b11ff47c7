"""What hears of a run: its resumes, steps, saves and end, as its log does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest
from anyrank.state.resume_report import ResumeReport


class OfferedStep(ABC):
    """A step of a run that is not in its folder, as a snapshot in the machines' memory.

    Attributes:
        step, run: of its manifest.
        path, what: for messages.
        holder: global rank that can examine it.
    """

    step: int
    run: str
    path: str
    what: str
    holder: int

    @abstractmethod
    def examine(self) -> tuple[Manifest, Listing]:
        """Its manifest and listing. On its holder.

        Raises:
            CheckpointError: it is damaged, and says how.
        """

    @abstractmethod
    def bring(self, listing: Listing, files: Iterable[int]) -> Listing:
        """Make files readable on this rank, by their indices; the listing with their paths. All
        ranks.
        """


class RunListener:
    """Hears of what a run does. Made when the run is opened; every rank has the same listeners.

    All methods but `tell` are called by all ranks together, so they may agree.
    """

    def offers(self) -> Sequence[OfferedStep]:
        """Steps that a resume may take besides those in the folder, the newest first."""
        return ()

    def on_resume(
        self, report: ResumeReport | None, offered: OfferedStep | None
    ) -> ResumeReport | None:
        """The run was resumed, or began.

        Args:
            report: of the resume; None where there was nothing.
            offered: the step that was restored, if it was one of `offers`.

        Returns:
            The report, with what this listener knows besides.
        """
        return report

    def tell(self, number: int) -> Any:
        """What this rank tells the others of a step before it counts, in the run's agreement."""

    def on_step(self, news: Sequence[Any]) -> None:
        """A step has counted.

        Args:
            news: what each rank's listener has told of it.
        """

    def on_save(self) -> None:
        """A save has ended, or goes on in the background."""

    def on_close(self, error: BaseException | None) -> None:
        """The run is closed, by an error or without one."""
