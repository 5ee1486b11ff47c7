"""The saves of one run: who may write, one save after another, and what each left on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError
from anyrank.resume.options import ResumeArguments, RunOptions
from anyrank.resume.resume import resume_run
from anyrank.saving.background import Background
from anyrank.saving.lock import RunLock
from anyrank.saving.peers import PeerMemory, open_memory
from anyrank.saving.run_store import RunFolder
from anyrank.saving.save import SaveRecord, Snapshot, collect, write
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")
saving_log = logging.getLogger("anyrank.saving")

FAILED_EXIT_SEC = 10.0  # how long an exception waits for a save that is in flight


class Due(NamedTuple):
    """What follows a step: a save in files, a snapshot in the machines' memory."""

    save: bool
    snapshot: bool


class RunWriter:
    """Saves a state into a run's folder, in the foreground or during the training.

    Attributes:
        on_disk: step and run that are saved already.
        branch: the step that was resumed although newer ones are there, until a save.
        memory: where snapshots go, if anywhere.
        records: the saves of this process.
        last_save: when the last one ended, on the monotonic clock.
        has_callback: whether any rank has an `on_commit`; only the first rank's is called.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: TrainState,
        options: RunOptions,
        on_commit: Callable[[SaveRecord], object] | None,
    ) -> None:
        self._folder, self._state = folder, state
        self._lock = RunLock(folder.store, folder.place)
        self._options = options
        self._background = Background(self._write) if options.background else None
        self._on_commit = on_commit
        self._is_locked = self._is_first = False
        self.last_save = self._last_snapshot = time.monotonic()
        self.on_disk: tuple[int, str | None] | None = None
        self.branch: int | None = None
        self.memory: PeerMemory | None = None
        self.records: list[SaveRecord] = []
        self.has_callback = on_commit is not None

    @property
    def is_saved(self) -> bool:
        """Whether the state's step is on disk."""
        return (self._state.step, self._state.run) == self.on_disk

    @property
    def failed(self) -> bool:
        """Whether a background save has ended without a checkpoint."""
        return self._background is not None and self._background.failed

    @property
    def is_within_step(self) -> bool:
        """Whether microbatches were drawn that no completed step accounts for."""
        data = self._state.data
        return isinstance(data, ElasticData) and data.in_step

    def open(self, ranks: Ranks) -> None:
        """Look at the folder and at the optimizers, before hours of training. All ranks.

        Raises:
            CheckpointError: the folder is no place for a run, or an optimizer cannot be saved.
        """
        ranks.from_one("opening the run", self._folder.check_no_other)
        check = self._state.parts.check_optimizers
        ranks.together("opening the run", lambda: check(ranks.index))
        self._is_first = ranks.index == 0
        self.has_callback = ranks.any(self.has_callback, "opening the run")
        self.memory = open_memory(self._folder.path, ranks) if self._options.peers else None

    def warn_of_refusal(self, ranks: Ranks) -> None:
        """Say after the first step, when optimizers have their state, that no save can hold it.
        All ranks.
        """
        problem: str | None = None
        try:
            self._state.parts.check_optimizers(ranks.index)
        except CheckpointError as error:
            problem = str(error)
        found = [*filter(None, ranks.gather(problem, "looking at the optimizers"))]
        if found and self._is_first:
            saving_log.warning("after the first step: the next save will fail: %s", found[0])

    def resume(self, arguments: ResumeArguments, ranks: Ranks) -> ResumeReport | None:
        """Restore the state; None where there is nothing to resume. All ranks."""
        verify, memory = self._options.verify, self.memory
        resumed = resume_run(self._state, self._folder, arguments, verify, ranks, memory)
        if resumed is None:
            return None
        step = resumed.step
        self.branch = None if step is None else step.step
        in_memory = step is not None and step.memory is not None
        is_on_disk = step is not None and not in_memory
        self.on_disk = (self._state.step, self._state.run) if is_on_disk else None
        if memory is not None:
            memory.remove_but(*([step.candidate.name] if step is not None and in_memory else []))
        return resumed.report

    def due(self) -> Due:
        """What follows the step that ends now."""
        step, options = self._state.step + 1, self._options
        keeps = self.memory is not None and options.peers_cadence.is_due(step, self._last_snapshot)
        return Due(save=options.cadence.is_due(step, self.last_save), snapshot=keeps)

    def renew_lock(self) -> None:
        """Show other processes that the run is alive."""
        if self._is_locked:
            self._lock.renew()

    def save(self, ranks: Ranks, writers: Ranks | None, unless_saved: bool) -> None:
        """Save the state's step. All ranks.

        Args:
            ranks: for this thread.
            writers: the same ranks, for the background's thread.
            unless_saved: say nothing where the step is saved already.

        Raises:
            CheckpointError: nothing is committed, and no earlier step is touched.
        """
        start, state, folder = time.perf_counter(), self._state, self._folder
        ranks.together("preparing a save", lambda: self._prepare(ranks.index == 0))
        self.wait(ranks)
        if self.is_saved:
            if not unless_saved and ranks.index == 0:
                log.warning(
                    "%s: step %d is saved already, and a step is saved once: what was changed "
                    "since is not saved; it comes with the next step",
                    folder.path,
                    state.step,
                )
            return
        if self.branch is not None:
            branch, self.branch = self.branch, None
            ranks.from_one("leaving newer steps", lambda: folder.abandon(branch))
        snapshot = self._collect(ranks)
        state.run = snapshot.manifest.run
        if self._background is None:
            record = self._write(snapshot, ranks)
            self._note(replace(record, stall_seconds=time.perf_counter() - start))
            self._call_back_on_all(ranks)
            return
        assert writers is not None
        self._background.start(snapshot, ranks, writers, start)

    def _collect(self, ranks: Ranks) -> Snapshot:
        if isinstance(self._state.data, ElasticData):
            self._state.data.position.check_receipt(ranks)
        return collect(self._state, ranks)

    def remember(self, ranks: Ranks) -> None:
        """Keep a snapshot in the machines' memory. All ranks.

        A memory that has no room is given up with a warning: the files are there.

        Raises:
            CheckpointError: something cannot be saved.
        """
        assert self.memory is not None
        start = time.perf_counter()
        snapshot = self._collect(ranks)
        try:
            nbytes = self.memory.keep(snapshot)
        except CheckpointError as error:
            self.memory.remove_but()
            self.memory = None
            if ranks.index == 0:
                log.warning("peers: nothing is kept in memory from now on: %s", error)
            return
        self._state.run = snapshot.manifest.run
        self._last_snapshot = time.monotonic()
        seconds = time.perf_counter() - start
        log.debug("step %d is in memory: %d bytes, %.3f s", self._state.step, nbytes, seconds)

    def _check_boundary(self) -> None:
        """Refuse to save within a step."""
        self._state.parts.check_usable()
        if self.is_within_step:
            raise CheckpointError(
                "save() within a step, whose samples are not accounted for: save after the body "
                "of steps(), or call step_done first"
            )

    def _prepare(self, is_first: bool) -> None:
        """What can refuse a save: a step that is under way, and another writer of the folder."""
        self._check_boundary()
        if is_first and not self.is_saved:
            self._lock.take()
            if not self._is_locked:
                try:
                    self._folder.check_run(self._state.run)
                except CheckpointError:
                    self._lock.release()
                    raise
                self._is_locked = True

    def _write(self, snapshot: Snapshot, ranks: Ranks) -> SaveRecord:
        return write(snapshot, self._folder, ranks, self._options.keep, self._options.keeps)

    def wait(self, ranks: Ranks) -> None:
        """Return when no save is in flight. All ranks.

        Raises:
            CheckpointError: the save that was in flight failed.
        """
        if self._background is not None and self._background.is_in_flight:
            self._note(self._background.wait())
            self._call_back_on_all(ranks)

    def _note(self, record: SaveRecord) -> None:
        self.on_disk = (record.step, self._state.run)
        self.records.append(record)
        if self._is_first:
            saving_log.info("saved step %d: %s", record.step, record.path)

    def _call_back_on_all(self, ranks: Ranks) -> None:
        if self.has_callback:
            ranks.together("calling on_commit", lambda: self._call_back(ranks.index == 0))

    def _call_back(self, is_first: bool) -> None:
        if self._on_commit is not None and is_first:
            self._on_commit(self.records[-1])

    def leave(self, is_first: bool) -> None:
        """Finish while an exception passes: without a wait for ranks that may never come.

        A save in flight goes on where all ranks are still at it. Raises nothing: the exception
        that ends the run is the one to see.
        """
        try:
            if self._background is not None and self._background.is_in_flight:
                self._note(self._background.wait(FAILED_EXIT_SEC))
                self._call_back(is_first)
        except Exception as error:  # whatever on_commit raises
            log.error("while an exception ends the run: %s", error)

    def release(self) -> None:
        """Let go of the folder."""
        if self._is_locked:
            self._lock.release()
        self._is_locked = False
