"""`anyrank.Checkpoints`: the loop of a run, its saves, and its resume on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal

from anyrank.data.loader import ElasticLoader, abandon_step
from anyrank.data.position import Position, check_complete
from anyrank.data.step import Step, is_complete
from anyrank.errors import AnyrankError, CheckpointError, CorruptCheckpoint
from anyrank.files.run_folder import SavedStep
from anyrank.files.store import store_for
from anyrank.resume.cadence import cadence
from anyrank.resume.loop import (
    Loop,
    StepHooks,
    left_by_break,
    loader_of,
    lost_step,
    stop_condition,
)
from anyrank.resume.report import ResumeReport
from anyrank.resume.restore import Resuming, log_report
from anyrank.resume.run_store import RunFolder
from anyrank.resume.run_writer import RunWriter
from anyrank.resume.saving import SaveRecord
from anyrank.resume.select_step import VERIFY, Found, find, narrow
from anyrank.resume.signals import PendingSignals
from anyrank.resume.state import TrainState
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.resume")


class Checkpoints:
    """The checkpoints of one run, in one folder, and the loop that makes them.

    Every rank makes one with the same arguments, and all call its methods together, except
    `latest`, `saved` and `stats`, which any rank may call. Traffic runs on gloo groups of its own.
    Leaving the `with` block saves the last completed step, unless an exception leaves it.

    Args:
        path: a folder or URL of the run alone; made when it is not there.
        state: what is saved and resumed.
        keep: how many of the newest steps stay, at least 2.
        every: save every so many steps (500 or "500") or after a time ("10min"), decided on the
            first rank; None saves at the end, when asked, and on SIGTERM and SIGUSR1.
        background: hold the training only for a copy; at most one save is in flight.
        verify: what a resume compares: "full" every byte that it reads with its checksum, "size"
            all files' sizes and the small ones' checksums, "off" the small files' checksums only.
        keep_every: steps that are multiples of it stay for good.
        on_commit: called on the first rank with each `SaveRecord` once it is committed.
        process_group: the ranks that take part, or `anyrank.ALONE` for this process. Default: all.

    Raises:
        TypeError: `state` is no TrainState.
        ValueError: an argument outside of what is listed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        keep: int = 3,
        every: int | str | None = None,
        background: bool = False,
        verify: Literal["size", "full", "off"] = "full",
        keep_every: int | None = None,
        on_commit: Callable[[SaveRecord], object] | None = None,
        process_group: Group = None,
    ) -> None:
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
            given = type(state).__name__
            raise TypeError(f"state is a {given}: give Checkpoints(path, anyrank.TrainState(...))")
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2, as the newest may turn out damaged")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every}: give a positive number of steps, or None")
        if verify not in VERIFY:
            raise ValueError(f"verify={verify!r}: give one of {', '.join(VERIFY)}")
        self.path = os.fspath(path)
        self._state = state
        self._cadence = cadence(every)
        self._verify: str = verify
        self._process_group = process_group
        self._folder = RunFolder(store_for(self.path), self.path)
        self._writer = RunWriter(
            self._folder,
            state,
            keep=keep,
            keep_every=keep_every,
            background=background,
            on_commit=on_commit,
        )
        self._arguments = {
            "path": self.path,
            "keep": keep,
            "every": every,
            "background": background,
            "verify": verify,
            "keep_every": keep_every,
        }
        self._signals = PendingSignals()
        self._groups = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._writers: Ranks | None = None
        self._last_save = time.monotonic()
        self._counted = 0  # steps that this object has completed
        self._body: tuple[Step, StepHooks] | None = None  # what the loop is in
        self._was_broken_off = False  # whether an exception left the body of the last loop
        self._is_training = False  # on all ranks alike: whether a loop was begun

    # -- resume -----------------------------------------------------------------------------------

    def resume(self, which: str | int = "auto", *, skip: Sequence[str] = ()) -> ResumeReport | None:
        """Restore the run, on as many ranks as there are now. All ranks.

        The newest step that verifies is restored; damaged ones are renamed `.bad-...` and reported.
        Everything is compared before anything is changed. Random streams are restored last.

        Args:
            which: "auto": the newest, or None for an empty folder; "must": an empty folder is an
                error; a number: that step. Newer ones are set aside at the next save.
            skip: parts of the state that stay as they are.

        Returns:
            The report, equal on all ranks; None when there is nothing to resume.

        Raises:
            CheckpointError: the step does not fit the state, which is unchanged then; ranks give
                other arguments; or reading failed in the middle, and the state may not be used
                before it is resumed again.
            CorruptCheckpoint: steps are there, and all are damaged.
            RankError: a rank died or failed in an unforeseen way.
        """
        self._signals.watch()
        ranks = self._open()
        arguments = {"which": which, "skip": sorted(skip)}
        ranks.same_arguments("resume", arguments, CheckpointError, lambda: narrow(which))
        which = narrow(which)
        self.wait()
        fitted: list[Resuming] = []

        def fit(found: Found) -> str | None:
            resuming = Resuming(self._state, found, ranks, skip)
            try:
                resuming.fit()
                resuming.fill()
            except CorruptCheckpoint as error:
                return str(error)
            fitted.append(resuming)
            return None

        found = find(self._folder, which, self._verify, ranks, fit)
        if found is None:
            if which == "must":
                raise CheckpointError(
                    f"{self.path}: holds no checkpoint, and resume('must') never starts anew: "
                    "check the path, or use 'auto'"
                )
            return None
        (resuming,) = fitted
        leaves_newer = isinstance(which, int) or bool(found.left)
        self._writer.branch = found.manifest.step if leaves_newer else None
        report = resuming.report(self._folder, self._verify)
        self._writer.on_disk = (self._state.step, self._state.run)
        if ranks.index == 0:
            log_report(report, found.manifest.differed)
        return report

    # -- the loop ---------------------------------------------------------------------------------

    def steps(self, *, until: int | None = None, epochs: int | None = None) -> Iterable[Step]:
        """Go over the steps of the run's `ElasticLoader`, and save when due and at the end.

        A step counts when the loop's body ends. A body that is left by `break` or `return` counts
        if the optimizer has stepped in it; an exception counts nothing and saves nothing, and one
        that comes after the optimizer's step leaves a state that has to be resumed. Goes
        from epoch to epoch; a run that has reached its end already gets no step. All ranks.

        Args:
            until: optimizer steps of the whole run, earlier processes included.
            epochs: epochs of the whole run; give this or `until`.

        Returns:
            The steps, each to be trained with `step.microbatches(model)`.

        Raises:
            ValueError: both limits, none, or a negative one.
            TypeError: the state's data is no ElasticLoader; a limit that is no int.
            CheckpointError: ranks give other limits; or a save failed, and the last committed step
                is still there.
        """
        loader, is_finished = loader_of(self._state), stop_condition(self._state, until, epochs)
        limits = {"until": until, "epochs": epochs}
        return Loop(lambda: self._loop(loader, is_finished, limits))

    def _loop(
        self, loader: ElasticLoader, is_finished: Callable[[], bool], limits: Mapping[str, object]
    ) -> Generator[Step, None, None]:
        self._signals.watch()
        check = self._state.check_usable
        self._open().same_arguments("steps", limits, CheckpointError, check)
        self._is_training, self._was_broken_off = True, False
        with StepHooks(self._state) as hooks:
            while not is_finished():
                for step in loader:
                    hooks.stepped = False
                    self._body = step, hooks
                    try:
                        yield step
                    except GeneratorExit:
                        self._leave_body(left_by_break())
                        raise
                    self._body = None
                    self.step_done()
                    if is_finished():
                        break
        if self._counted:
            self.save()

    def _leave_body(self, on_purpose: bool) -> None:
        """Account for a body that did not run to its end. Each rank by itself; raises nothing."""
        if self._body is None:
            return
        (step, hooks), self._body = self._body, None
        self._was_broken_off = not on_purpose
        if not hooks.stepped:
            abandon_step(loader_of(self._state))  # the weights are those of the step before
        elif on_purpose and is_complete(step):
            self._count()
        else:
            self._state.poison = lost_step(step, on_purpose)

    def step_done(self) -> None:
        """Complete an optimizer step in a loop of one's own, and save when due. All ranks.

        Learns here, on all ranks together, of a background save that failed, and of SIGTERM (a
        last save, then SystemExit) and SIGUSR1 (a save) that any rank got.

        Raises:
            CheckpointError: the step is not complete, and counts on no rank; or a save failed, and
                the last committed step is still there.
        """
        self._signals.watch()
        ranks = self._open()
        self._is_training = True

        def here() -> tuple[bool, int | None, bool]:
            self._state.check_usable()
            if isinstance(self._state.data, Position):
                check_complete(self._state.data)
            due = self._is_first and self._cadence.is_due(self._state.step + 1, self._last_save)
            return self._writer.failed, self._signals.take(), due

        flags = ranks.together("completing the step", here)
        self._count()
        mine, wishes = flags[ranks.index][1], {flag[1] for flag in flags if flag[1] is not None}
        try:
            if any(flag[0] for flag in flags):
                self.wait()
            if flags[0][2] or wishes:
                self.save()
            else:
                self._writer.renew_lock()
        except AnyrankError:
            if mine is not None:
                self._signals.give_back(mine)  # it is still to be done, at the next boundary
            raise
        if signal.SIGTERM in wishes:
            self.close()
            log.warning("SIGTERM: step %d is saved, and the run ends here", self._state.step)
            raise SystemExit(128 + signal.SIGTERM)

    def _count(self) -> None:
        """Count a step whose optimizer has stepped. Each rank by itself."""
        state = self._state
        if isinstance(state.data, Position):
            state.data.commit()
            state.samples = state.data.samples
        state.step += 1
        self._counted += 1

    # -- save -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save now, at a step boundary; with background=True, return after a copy. All ranks.

        A step that is saved already is left as it is.

        Raises:
            CheckpointError: something cannot be saved, a rank could not write, or the call comes
                within a step. Nothing is committed then, and no earlier step is touched.
        """
        ranks = self._open()
        self._writer.save(ranks, self._writers)
        self._last_save = time.monotonic()

    def wait(self) -> None:
        """Return when no save is in flight. All ranks.

        Raises:
            CheckpointError: the save that was in flight failed.
        """
        if self._ranks is not None:
            self._writer.wait(self._ranks)

    # -- look -------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Path of the newest committed step, or None. Any rank."""
        steps = self._folder.committed()
        return self._folder.join(steps[0][1]) if steps else None

    def saved(self) -> list[SavedStep]:
        """The committed steps, the newest first; damaged ones are left out. Any rank."""
        return self._folder.saved()

    def stats(self) -> list[SaveRecord]:
        """The saves of this process: step, path, bytes, seconds, stall seconds, removed steps."""
        return [*self._writer.records]

    # -- the processes ----------------------------------------------------------------------------

    def _open(self) -> Ranks:
        """The ranks; on the first call, opened together."""
        if self._ranks is None:
            ranks = self._groups.enter_context(open_ranks(self._process_group, "Checkpoints()"))
            ranks.same_arguments("Checkpoints", self._arguments, CheckpointError)
            if self._arguments["background"]:
                # The writing thread's collectives must not mix with those of the main one.
                self._writers = self._groups.enter_context(open_ranks(self._process_group))
            self._writer.has_callback = ranks.any(self._writer.has_callback, "opening the run")
            self._ranks = ranks
        return self._ranks

    @property
    def _is_first(self) -> bool:
        return self._ranks is not None and self._ranks.index == 0

    def close(self) -> None:
        """Finish what is in flight, and release the folder, the signals and the groups. All ranks.

        Saves nothing more: leaving the `with` block does.

        Raises:
            CheckpointError: the save that was in flight failed; all else is released all the same.
        """
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._signals.restore()
        self._writer.release()
        self._ranks = self._writers = None
        self._groups.close()

    def __enter__(self) -> Checkpoints:
        self._signals.watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._writer.leave(self._is_first)
                return
            self._leave_body(on_purpose=False)  # still open: somebody holds the loop's iterator
            if self._is_training and self._ranks is not None:
                self._save_last(self._ranks)
            self.wait()
        finally:
            self._release()

    def _save_last(self, ranks: Ranks) -> None:
        """Save the last completed step, where no rank has moved the state since."""

        def here() -> tuple[bool, bool]:
            if not self._was_broken_off:
                self._state.check_usable()
            return self._counted > 0, self._was_broken_off or self._writer.is_within_step

        flags = ranks.together("leaving the loop", here)
        if any(was_broken_off for _, was_broken_off in flags):
            log.warning(
                "step %d was begun and not completed, so nothing is saved on leaving: the newest "
                "checkpoint stays the one before",
                self._state.step,
            )
        elif any(has_counted for has_counted, _ in flags):
            self.save()
