"""The listener that writes a run's log: how its time is spent, and its loss."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anyrank.runs.resume.listener import RunListener
from anyrank.runs.resume.run_log import END, ERROR, LOG, START, LogLine, read_log
from anyrank.runs.resume.run_time import sum_up
from anyrank.runs.resume.search import StepOfRun
from anyrank.runs.saving.lock import RunLock
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.training.steps.loader import ElasticLoader
from anyrank.world.failures import is_death
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

LINE_STEPS = 10  # steps between two lines
MAX_LINES = 1000  # lines that are kept before the first save


class LogListener(RunListener):
    """The log of one process of a run. Every rank has one; only the first rank's writes.

    Lines stay in memory until this process has the folder's lock, which its first save takes.

    Args:
        folder: folder of the run; no log is written in an object store, which cannot append.
        lock: lock of the folder.
        state: state of the run.
        ranks: ranks of the run.
        waited_sec: returns the seconds that this rank has waited for others so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        state: TrainState,
        ranks: Ranks,
        waited_sec: Callable[[], float],
    ) -> None:
        self._folder, self._lock, self._state, self._ranks = folder, lock, state, ranks
        self._waited_sec = waited_sec
        self._writes = ranks.index == 0 and folder.store.renames
        self._lines = collections.deque[LogLine](maxlen=MAX_LINES)
        self._has_begun = False
        self._redone_steps = 0
        self._steps_sec = self._saves_sec = self._restart_sec = 0.0
        self._last = time.monotonic()

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        redone_steps = self._ranks.run_on_one("reading the run's log", self._note_restart)
        return None if report is None else replace(report, redone_steps=redone_steps)

    def _note_restart(self) -> int:
        """Record the end of a resume; return an upper bound on the repeated steps. The first
        rank."""
        self._restart_sec, self._last = self._since_last(), time.monotonic()
        lines = read_log(self._folder.absolute_path) if self._writes else ()
        for last_line in collections.deque(lines, maxlen=1):
            # A killed process has done steps since its last line, fewer than until the next one.
            # One whose other ranks were killed writes a last line, usually between two others.
            since_line = last_line.step % LINE_STEPS
            is_last = last_line.event in (END, ERROR) or (since_line and last_line.event != START)
            unknown = 0 if is_last else LINE_STEPS - 1 - since_line
            self._redone_steps = max(0, last_line.step + unknown - self._state.step)
            if last_line.event != END:
                self._restart_sec = max(0.0, time.time() - last_line.time)
        return self._redone_steps

    def tell(self, number: int) -> tuple[float, float] | None:
        """Return the weighted sum and weight of this rank's losses, in a step that is logged."""
        data = self._state.data
        run = data.position.current if isinstance(data, ElasticLoader) else None
        last = run.passes[-1] if run is not None and run.passes else None
        if last is None or number % LINE_STEPS or not last.losses:
            return None
        losses = sum(weight * float(loss) for weight, loss in last.losses if weight)
        return losses, sum(last.weights.values())

    def join(self, news: Any, others: Any) -> tuple[float, float] | None:
        if news is None or others is None:
            return news or others
        return news[0] + others[0], news[1] + others[1]

    def on_step(self, news: Any) -> None:
        self._steps_sec, self._last = self._steps_sec + self._since_last(), time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._write(self._state.step - 1, event=START, redone_steps=self._redone_steps)
        if self._state.step % LINE_STEPS == 0:
            losses, weight = news or (0.0, 0.0)
            self._write(self._state.step, losses / weight if weight else None)

    def on_save(self) -> None:
        self._saves_sec, self._last = self._saves_sec + self._since_last(), time.monotonic()
        self._flush()

    def on_close(self, error: BaseException | None) -> None:
        """Write the last line, and log a summary."""
        if not self._has_begun:
            return
        event = ERROR if isinstance(error, Exception) else END
        # If another rank died, this process did not end by itself: it counts as killed.
        self._write(self._state.step, event="" if is_death(error) else event)
        if self._writes and log.isEnabledFor(logging.INFO):
            run_time = sum_up(read_log(self._folder.absolute_path))
            if run_time is not None:  # a run that was never saved has no log
                log.info("%s: %s", self._folder.path, run_time)

    def _since_last(self) -> float:
        return time.monotonic() - self._last

    def _write(
        self, step: int, loss: float | None = None, event: str = "", redone_steps: int = 0
    ) -> None:
        if not self._writes:
            return
        waited = self._waited_sec()
        seconds = self._steps_sec - waited, self._saves_sec, self._restart_sec, waited
        rounded = (round(max(0.0, part), 3) for part in seconds)
        size = self._ranks.size
        self._lines.append(LogLine(time.time(), step, size, loss, event, redone_steps, *rounded))
        self._flush()

    def _flush(self) -> None:
        """Write the lines if this process has the folder's lock; a failure ends the log."""
        if not self._lines or not self._lock.is_held:
            return
        lines = "".join(f"{line.to_json()}\n" for line in self._lines)
        self._lines.clear()
        try:
            with open(os.path.join(self._folder.absolute_path, LOG), "ab+") as file:
                file.seek(max(0, file.tell() - 1))
                is_cut = file.read() not in (b"", b"\n")  # by a kill in the middle of a line
                file.write(b"\n" * is_cut + lines.encode())
        except OSError as error:
            self._writes = False
            log.warning("%s: the log ends here: %s", self._folder.path, error)
