"""Writes the log of a run: how its time is spent, and which rank is slow."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Sequence

from torch import nn

from anyrank.formats.run_log import END, ERROR, LOG, START, LogLine, read_log, sum_up
from anyrank.resume.loop import BoundaryReport
from anyrank.saving.lock import RunLock
from anyrank.saving.run_folder import RunFolder
from anyrank.state.train_state import TrainState
from anyrank.state.wrappers import innermost
from anyrank.steps.loader import ElasticLoader
from anyrank.steps.pace import Pace, Spent
from anyrank.world.failures import is_of_others
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

LINE_STEPS = 10  # steps between two lines
MAX_LINES = 1000  # that are kept before the first save


class LogWriter:
    """The log of one process of a run. Every rank has one; the first one's writes.

    Lines are kept in memory until this process has the folder's lock, from its first save on.

    Args:
        folder: of the run; in an object store, which cannot append, no log is written.
        lock: of the folder.
        state: of the run.
    """

    def __init__(self, folder: RunFolder, lock: RunLock, state: TrainState) -> None:
        self._folder, self._lock, self._state = folder, lock, state
        self._ranks: Sequence[int] = ()
        self._is_first = self._writes = False
        self._lines = collections.deque[LogLine](maxlen=MAX_LINES)
        self._pace: Pace | None = None
        self._has_begun = False
        self._lost = 0
        self._steps_sec = self._saves_sec = self._restart_sec = 0.0
        self._last = time.monotonic()

    def open(self, ranks: Ranks) -> None:
        """Set the ranks."""
        self._ranks = ranks.ranks
        self._is_first = ranks.index == 0
        self._writes = self._is_first and self._folder.store.renames

    def note_resume(self) -> int:
        """Record the end of a resume; the most steps that were done after it. The first rank."""
        self._restart_sec, self._last = self._since_last(), time.monotonic()
        lines = read_log(self._folder.absolute_path) if self._writes else ()
        most = 0
        for last_line in collections.deque(lines, maxlen=1):
            self._lost = max(0, last_line.step - self._state.step)
            # A process that was killed has done steps since its last line, short of the next one.
            # One whose other ranks were killed writes a last line, mostly between two others.
            is_last = last_line.event in (END, ERROR) or last_line.step % LINE_STEPS
            unknown = 0 if is_last and last_line.event != START else LINE_STEPS - 1
            most = max(0, last_line.step + unknown - self._state.step)
            if last_line.event != END:
                self._restart_sec = max(0.0, time.time() - last_line.time)
        return most

    def take_loss(self, number: int) -> tuple[float, float] | None:
        """Weighted sum and weight of this rank's losses, in a step with a line of the log."""
        data = self._state.data
        run = data.position.current if isinstance(data, ElasticLoader) else None
        if run is None or number % LINE_STEPS or not run.losses:
            return None
        losses = sum(weight * float(loss) for weight, loss in run.losses if weight)
        return losses, sum(run.weights.values())

    def take_window(self) -> list[Spent]:
        """The times of this rank's last steps if they are due; mostly nothing."""
        return [] if self._pace is None else self._pace.take_window()

    def note_step(self, reports: Sequence[BoundaryReport]) -> bool:
        """Record a counted step; returns whether it is the first. All ranks."""
        self._steps_sec, self._last = self._steps_sec + self._since_last(), time.monotonic()
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            self._start_pace()
            self._write(self._state.step - 1, event=START, lost=self._lost)
        spent = [report.spent for report in reports]
        if self._pace is not None and self._is_first and all(spent):
            self._pace.warn_of_slow(self._ranks, spent)
        if self._state.step % LINE_STEPS == 0:
            losses = [report.loss for report in reports if report.loss is not None]
            weight = sum(weight for _, weight in losses)
            loss = sum(loss for loss, _ in losses) / weight if weight else None
            self._write(self._state.step, loss)
        return is_first

    def note_save(self) -> None:
        """Record a save, which has ended or goes on in the background. All ranks."""
        self._saves_sec, self._last = self._saves_sec + self._since_last(), time.monotonic()
        if self._pace is not None:
            self._pace.pause()
        self._flush()

    def close(self, error: BaseException | None = None) -> None:
        """Write the last line, and log a summary.

        Args:
            error: that ends the run. One of the connections to other ranks is no end of this
                process's own: a rank has died.
        """
        if self._pace is not None:
            self._pace.close()
        if self._has_begun:
            event = ERROR if isinstance(error, Exception) else END
            self._write(self._state.step, event="" if is_of_others(error) else event)
            summary = sum_up(read_log(self._folder.absolute_path)) if self._writes else None
            if summary is not None:
                log.info("%s: %s", self._folder.path, summary)
        self._has_begun, self._pace = False, None

    def _start_pace(self) -> None:
        """Measure the parts of each step by hooks of the model, from the second step on."""
        model = self._state.parts.parts.get("model")
        if isinstance(model, nn.Module):
            if Pace.running is not None:  # that of a watch
                Pace.running.close()
            self._pace = Pace(model, [innermost(o) for o in self._state.parts.optimizers()])

    def _since_last(self) -> float:
        return time.monotonic() - self._last

    def _write(self, step: int, loss: float | None = None, event: str = "", lost: int = 0) -> None:
        if self._writes:
            waited = 0.0 if self._pace is None else self._pace.waited_sec
            seconds = self._steps_sec - waited, self._saves_sec, self._restart_sec, waited
            rounded = (round(max(0.0, part), 3) for part in seconds)
            self._lines.append(
                LogLine(time.time(), step, len(self._ranks), loss, event, lost, *rounded)
            )
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
                is_cut = file.read() not in (b"", b"\n")  # a kill in the middle of a line
                file.write(b"\n" * is_cut + lines.encode())
        except OSError as error:
            self._writes = False
            log.warning("%s: the log is not continued: %s", self._folder.path, error)
