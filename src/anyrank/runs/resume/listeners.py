"""The listeners of one run: its log, and those that its options and its ranks need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyrank.runs.resume.listener import RunListener
from anyrank.runs.resume.log_listener import LogListener
from anyrank.runs.resume.options import SaveOptions
from anyrank.runs.resume.pace_listener import PaceListener
from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.lock import RunLock
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.world.ranks import Ranks


class Listeners(list[RunListener]):
    """Calls each listener, in an order that is the same on every rank."""

    def open_search(self, folder: RunFolder, verify: bool, ranks: Ranks) -> StepSearch:
        """Open the search for the newest step. Collective.

        A listener that knows of more steps than the folder opens it; otherwise the folder does.
        """
        searches = (listener.open_search(folder, verify) for listener in self)
        return next(filter(None, searches), None) or StepSearch(folder, None, verify, ranks)

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        """Report that the run was resumed or started; return the extended report. Collective."""
        for listener in self:
            report = listener.on_resume(report, step)
        return report

    def tell(self, number: int) -> list[Any]:
        """Collect what each listener tells the other ranks about a step before it counts."""
        return [listener.tell(number) for listener in self]

    def join(self, news: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Merge the reports of ranks."""
        rows = zip(self, news, others, strict=True)
        return [listener.join(of_some, of_others) for listener, of_some, of_others in rows]

    def on_step(self, news: Sequence[Any]) -> None:
        """Report that a step has counted, with what the ranks have told about it. Collective."""
        for listener, of_listener in zip(self, news, strict=True):
            listener.on_step(of_listener)

    def on_save(self) -> None:
        """Report that a save has ended, or continues in the background. Collective."""
        for listener in self:
            listener.on_save()

    def close(self, error: BaseException | None) -> None:
        """Report that the run is closed; its listeners are not called again."""
        for listener in self:
            listener.on_close(error)
        self.clear()


def open_listeners(
    state: TrainState, folder: RunFolder, lock: RunLock, options: SaveOptions, ranks: Ranks
) -> Listeners:
    """Open the listeners of a run that is opened. Collective.

    Args:
        state: state of the run.
        folder: folder of the run.
        lock: lock of the folder.
        options: options of the run.
        ranks: ranks of the run.
    """
    opened, waited_sec = Listeners(), float
    if ranks.size > 1:  # a single rank never waits for another
        pace = PaceListener(state, ranks)
        opened.append(pace)
        waited_sec = pace.waited_sec
    opened.append(LogListener(folder, lock, state, ranks, waited_sec))
    if options.peers:
        from anyrank.runs.peers.memory import open_memory

        opened += open_memory(options.path, state, ranks, options.peers_cadence)
    return opened
