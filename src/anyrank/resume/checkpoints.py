"""`anyrank.Checkpoints`: saves of a run, and its resume on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.optim import Optimizer

from anyrank.errors import AnyrankError, CheckpointError, CorruptCheckpoint
from anyrank.files.store import store_for
from anyrank.resume.background import Background
from anyrank.resume.cadence import cadence
from anyrank.resume.data.position import Position
from anyrank.resume.finding import VERIFY, Found, find, narrow
from anyrank.resume.folder import RunFolder, describe
from anyrank.resume.lock import RunLock
from anyrank.resume.report import ResumeReport
from anyrank.resume.resuming import Resuming, differed_in_words
from anyrank.resume.saving import SaveRecord, Snapshot, collect, write
from anyrank.resume.signals import Wishes
from anyrank.resume.state import TrainState
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.resume")


def refuse_within_step(state: TrainState) -> None:
    """Refuse to save what is not accounted for.

    Raises:
        CheckpointError: microbatches of a step were taken, and step_done was not called.
    """
    if isinstance(state.data, Position) and state.data.in_step:
        raise CheckpointError(
            "save() within a step, whose samples are not accounted for: call step_done first"
        )


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Every rank makes one with the same arguments, and all call its methods together, except
    `latest`, `list` and `stats`, which any rank may call. Traffic runs on gloo groups of its own.

    Args:
        path: a folder or URL of the run alone; made when it is not there.
        keep: how many of the newest steps stay, at least 2.
        every: save every so many steps (500 or "500") or after a time ("10min"), decided on the
            first rank; None saves when asked, and on SIGTERM and SIGUSR1.
        background: hold the training only for a copy; at most one save is in flight.
        verify: what a resume compares: "full" every byte that it reads with its checksum, "size"
            all files' sizes and the small ones' checksums, "off" the small files' checksums only.
        keep_every: steps that are multiples of it stay for good.
        on_commit: called on the first rank with each `SaveRecord` once it is committed.
        process_group: the ranks that take part. Default: all, or this process alone.

    Raises:
        ValueError: an argument outside of what is listed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 3,
        every: int | str | None = None,
        background: bool = False,
        verify: Literal["size", "full", "off"] = "full",
        keep_every: int | None = None,
        on_commit: Callable[[SaveRecord], object] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2, as the newest may turn out damaged")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every}: give a positive number of steps, or None")
        if verify not in VERIFY:
            raise ValueError(f"verify={verify!r}: give one of {', '.join(VERIFY)}")
        self.path = os.fspath(path)
        self.keep, self.keep_every = keep, keep_every
        self.cadence = cadence(every)
        self.verify: str = verify
        self.on_commit = on_commit
        self.process_group = process_group
        self.folder = RunFolder(store_for(self.path), self.path)
        self.lock = RunLock(self.folder.store, self.path)
        self.background = Background(self._write) if background else None
        self.wishes = Wishes()
        self.opened = contextlib.ExitStack()
        self.ranks: Ranks | None = None
        self.writers: Ranks | None = None
        self.last_save = time.monotonic()
        self.saves: list[SaveRecord] = []
        self.locked = False
        # The step that was resumed though newer ones are there, until a save.
        self.branch: int | None = None
        self.on_disk: tuple[int, str | None] | None = None  # step and run that are on disk
        self.pending: tuple[TrainState, Snapshot] | None = None

    # -- resume -----------------------------------------------------------------------------------

    def resume(
        self, state: TrainState, which: str | int = "auto", *, skip: Sequence[str] = ()
    ) -> ResumeReport | None:
        """Restore a run, on as many ranks as there are now. All ranks.

        The newest step that verifies is taken; damaged ones are renamed `.bad-...` and reported.
        Everything is compared before anything is changed. Random streams are restored last.

        Args:
            state: what to restore, as it is built for a new run.
            which: "auto": the newest, or None for an empty folder; "must": an empty folder is an
                error; a number: that step. Newer ones are set aside at the next save.
            skip: parts of the state that stay as they are.

        Returns:
            The report, equal on all ranks; None when there is nothing to resume.

        Raises:
            CheckpointError: the step does not fit the state, which is unchanged then; or reading
                failed in the middle, and the state may not be used before it is resumed again.
            CorruptCheckpoint: steps are there, and all are damaged.
            RankError: a rank died or failed in an unforeseen way.
        """
        which = narrow(which)
        self.wait()
        ranks = self._open()
        fitted: list[Resuming] = []

        def fit(found: Found) -> str | None:
            resuming = Resuming(state, found, ranks, skip)
            try:
                resuming.fit()
                resuming.fill()
            except CorruptCheckpoint as error:
                return str(error)
            fitted.append(resuming)
            return None

        found = find(self.folder, which, self.verify, ranks, fit)
        if found is None:
            if which == "must":
                raise CheckpointError(
                    f"{self.path}: holds no checkpoint, and resume('must') never starts anew: "
                    "check the path, or use 'auto'"
                )
            return None
        (resuming,) = fitted
        leaves_newer = isinstance(which, int) or bool(found.left)
        self.branch = found.manifest.step if leaves_newer else None
        report = resuming.report(self.folder, self.verify)
        self.on_disk = (state.step, state.run)
        if ranks.index == 0:
            self._tell(report, found.manifest.differed)
        return report

    def _tell(self, report: ResumeReport, differed: Sequence[str]) -> None:
        log.info("%s", report)
        if report.set_aside:
            log.warning(
                "%d steps and %d samples are lost: damaged, set aside as %s",
                report.lost_steps,
                report.lost_samples,
                ", ".join(report.set_aside),
            )
        for name, outcome in report.components.items():
            if outcome not in ("exact", "resharded"):
                log.warning("%s is %s: %s", name, outcome, outcome.reason)
        for note in differed_in_words(differed):
            log.warning("%s", note)

    # -- save -------------------------------------------------------------------------------------

    def step_done(self, state: TrainState) -> None:
        """Complete an optimizer step: count it, and save when one is due. All ranks.

        Learns here, on all ranks together, of a background save that failed, and of SIGTERM (a
        last save, then SystemExit) and SIGUSR1 (a save) that any rank got.

        Raises:
            CheckpointError: a save failed; the last committed step is still there.
        """
        self.wishes.watch()
        ranks = self._open()

        def here() -> tuple[bool, int | None, bool]:
            state.check_usable()
            self._complete(state)
            failed = self.background is not None and self.background.failed
            due = self._is_first and self._is_due(state.step)
            return failed, self.wishes.take(), due

        flags = ranks.together("completing the step", here)
        mine, wishes = flags[ranks.index][1], {flag[1] for flag in flags if flag[1] is not None}
        try:
            if any(flag[0] for flag in flags):
                self.wait()
            if flags[0][2] or wishes:
                self.save(state)
            elif self.locked:
                self.lock.renew()
        except AnyrankError:
            if mine is not None:
                self.wishes.give_back(mine)  # it is still to be done, at the next boundary
            raise
        if signal.SIGTERM in wishes:
            self.close()
            log.warning("SIGTERM: step %d is saved, and the run ends here", state.step)
            raise SystemExit(128 + signal.SIGTERM)

    def _complete(self, state: TrainState) -> None:
        if isinstance(state.data, Position):
            state.data.commit()
            state.samples = state.data.samples
        state.step += 1

    def _is_due(self, step: int) -> bool:
        if self.cadence.steps is not None:
            return step % self.cadence.steps == 0
        if self.cadence.seconds is not None:
            return time.monotonic() - self.last_save >= self.cadence.seconds
        return False

    def save(self, state: TrainState) -> None:
        """Save now, at a step boundary; with background=True, return after a copy. All ranks.

        A step that is saved already is left as it is.

        Raises:
            CheckpointError: something cannot be saved, a rank could not write, or the call comes
                within a step. Nothing is committed then, and no earlier step is touched.
        """
        ranks = self._open()
        start, folder = time.perf_counter(), self.folder
        ranks.together("preparing a save", lambda: self._prepare(state))
        self.wait()
        if (state.step, state.run) == self.on_disk:
            return
        if self.branch is not None:
            branch, self.branch = self.branch, None
            ranks.from_one("leaving newer steps", ranks.ranks[0], lambda: folder.abandon(branch))
        if isinstance(state.data, Position):
            state.data.check_receipt(ranks)
        snapshot = collect(state, ranks)
        self.last_save = time.monotonic()
        if self.background is None:
            record = self._write(snapshot, ranks)
            self._done(state, record, snapshot, time.perf_counter() - start)
            return
        self.background.watch([p for p in state.parts.values() if isinstance(p, Optimizer)])
        assert self.writers is not None
        self.background.start(snapshot, ranks, self.writers)
        self.background.stall += time.perf_counter() - start
        self.pending = (state, snapshot)

    def _write(self, snapshot: Snapshot, ranks: Ranks) -> SaveRecord:
        return write(snapshot, self.folder, ranks, self.keep, self.keep_every)

    def wait(self) -> None:
        """Return when no save is in flight. All ranks.

        Raises:
            CheckpointError: the save that was in flight failed.
        """
        if self.background is None or self.pending is None:
            return
        (state, snapshot), self.pending = self.pending, None
        record = self.background.wait()
        self._done(state, record, snapshot, record.stall_seconds)

    def _done(
        self, state: TrainState, record: SaveRecord, snapshot: Snapshot, stall: float
    ) -> None:
        state.run = snapshot.header["run"]
        self.on_disk = (record.step, state.run)
        self.saves.append(replace(record, stall_seconds=stall))
        log.info("saved step %d: %s", record.step, record.path)
        if self.on_commit is not None:
            self._open().together("calling on_commit", self._call_back)

    def _call_back(self) -> None:
        if self.on_commit is not None and self._is_first:
            self.on_commit(self.saves[-1])

    # -- look -------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Path of the newest committed step, or None. Any rank."""
        steps = self.folder.committed()
        return self.folder.join(steps[0][1]) if steps else None

    def list(self) -> list[dict[str, Any]]:
        """The committed steps, the newest first: step, epoch, samples, written, ranks, bytes.

        Damaged ones are left out. Any rank.
        """
        found: list[Any] = []
        for _, name in self.folder.committed():
            with contextlib.suppress(AnyrankError):
                found.append(self.folder.examine(name)[0])
        return describe(found)

    def stats(self) -> list[SaveRecord]:
        """The saves of this process: step, path, bytes, seconds, stall seconds, removed steps."""
        return [*self.saves]

    # -- the processes ----------------------------------------------------------------------------

    def _open(self) -> Ranks:
        """The ranks; on the first call, opened together."""
        if self.ranks is None:
            self.ranks = self.opened.enter_context(open_ranks(self.process_group))
            if self.background is not None:
                # The writing thread's collectives must not mix with those of the main one.
                self.writers = self.opened.enter_context(open_ranks(self.process_group))
        return self.ranks

    def _prepare(self, state: TrainState) -> None:
        """What can refuse a save: a step that is under way, and another writer of the folder."""
        refuse_within_step(state)
        if self._is_first and (state.step, state.run) != self.on_disk:
            self.lock.take()
            if not self.locked:
                try:
                    self.folder.check_run(state.run)
                except CheckpointError:
                    self.lock.release()
                    raise
                self.locked = True

    @property
    def _is_first(self) -> bool:
        return self.ranks is not None and self.ranks.index == 0

    def close(self) -> None:
        """Finish what is in flight, and release the folder, the signals and the groups. All ranks.

        Raises:
            CheckpointError: the save that was in flight failed; all else is released all the same.
        """
        try:
            self.wait()
        finally:
            self.wishes.restore()
            if self.background is not None:
                self.background.close()
            if self.locked:
                self.lock.release()
            self.locked = False
            self.ranks = self.writers = None
            self.opened.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
