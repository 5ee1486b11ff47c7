"""`anyrank.Checkpoints`: the loop of a run, its saves, and its resume on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from anyrank.checks import check_function, check_path, check_type
from anyrank.data.position import check_same_on_ranks
from anyrank.errors import AnyrankError, CheckpointError
from anyrank.files.store import store_for
from anyrank.formats.run_folder import SavedStep
from anyrank.resume.loop import (
    BoundaryReport,
    Loop,
    StepCounter,
    StepHooks,
    loader_of,
    stop_condition,
)
from anyrank.resume.options import ResumeArguments, RunOptions
from anyrank.resume.run_writer import RunWriter
from anyrank.resume.signals import PendingSignals
from anyrank.saving.run_store import RunFolder
from anyrank.saving.save import SaveRecord
from anyrank.state.replicas import check_replicas
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState, run_parts
from anyrank.steps.loader import ElasticLoader
from anyrank.steps.step import Step
from anyrank.tensors.names import Rename
from anyrank.world.arguments import same_arguments
from anyrank.world.group import Group, check_group
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.resume")


class Checkpoints:
    """The checkpoints of one run, in one folder, and the loop that makes them.

    Every rank makes one with the same arguments, and calls it from one thread. Any rank may call
    `latest`, `saved` and `stats`, all the other methods are for all ranks together.
    Leaving the `with` block saves the last completed step, unless an exception leaves it.

    Args:
        path: a folder or URL of the run alone; made when it is not there.
        state: what is saved and resumed.
        keep: how many of the newest steps stay, at least 2.
        every: save every so many steps (500 or "500") or after a time ("10min"), decided on the
            first rank; None saves at the end, when asked, and on SIGTERM and SIGUSR1.
        background: hold the training only for a copy; at most one save is in flight.
        verify: compare every byte that a resume reads with its checksum; False: all files' sizes,
            and the small ones' checksums.
        keep_every: steps that are multiples of it, or for which a function of it is true, stay.
        on_commit: called on the first rank with each `SaveRecord` once it is committed.
        peers: under `anyrank run`, keep a snapshot in the machines' memory after each step, from
            which a restart goes on; or after so many steps, or a time, as for `every`.
        replicas_every: compare the whole of what ranks hold alike, model and optimizers, every so
            many steps; saves compare parts of it. What differs is an error that names it.
        process_group: the ranks that take part, or `anyrank.ALONE` for this process. Default: all.

    Raises:
        TypeError: `state` is not a TrainState; an argument of another type.
        ValueError: an argument outside of what is listed.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2)
        state = anyrank.TrainState(model, optimizer, data=loader)
        with anyrank.Checkpoints("runs/a", state, every="10min") as ckpts:
            ckpts.resume()  # nothing yet: None
            for step in ckpts.steps(until=3):
                for x in step.microbatches(model):
                    step.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert [(saved.step, saved.samples) for saved in ckpts.saved()] == [(3, 12)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        keep: int = 3,
        every: int | str | None = None,
        background: bool = False,
        verify: bool = True,
        keep_every: int | Callable[[int], bool] | None = None,
        on_commit: Callable[[SaveRecord], object] | None = None,
        peers: bool | int | str = False,
        replicas_every: int | None = None,
        process_group: Group = None,
    ) -> None:
        self.path = check_path("path", path)
        check_type("state", state, TrainState, "an anyrank.TrainState")
        if on_commit is not None:
            check_function("on_commit", on_commit)
        check_group(process_group)
        self._options = RunOptions(
            self.path, keep, every, background, verify, keep_every, peers, replicas_every
        )
        self._folder = RunFolder(store_for(self.path), self.path)
        self._writer = RunWriter(self._folder, state, self._options, on_commit)
        self._state = state
        self._process_group = process_group
        self._signals = PendingSignals()
        self._groups = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._writers: Ranks | None = None
        self._counter = StepCounter(state)
        self._has_stepped = False
        self._is_training = False  # on all ranks alike: whether a loop was begun

    # -- resume -----------------------------------------------------------------------------------

    def resume(
        self,
        which: str | int | os.PathLike[str] = "auto",
        *,
        skip: Sequence[str] = (),
        fresh: Sequence[str] = (),
        rename: Rename = None,
    ) -> ResumeReport | None:
        """Restore the run, on as many ranks as there are now. All ranks.

        The newest undamaged step is restored; damaged ones are renamed `.aside-...`, and reported.
        Everything is compared before anything is changed. Random streams are restored last.

        A path into this run means that step, and the run's own path its newest. Any other path
        begins this run with a checkpoint from elsewhere: a step of another run, or what another
        tool saved. Of that, what is there comes over, and the report has the rest. Once the
        run has steps of its own these are resumed, so that a job that restarts goes on.

        Args:
            which: "auto": the newest, or None for an empty folder; "must": an empty folder is an
                error; a number: that step. Newer ones are set aside at the next save. Or a path or
                URL that is there.
            skip: parts of the state that stay as they are; with a path, where the run begins with
                it, and not once the run has steps of its own.
            fresh: names of parameters, or patterns as "head.*", that the checkpoint need not have:
                they keep their values, and their state in the optimizer starts anew.
            rename: for another tool's checkpoint, as for `load`: from its names to the model's.

        Returns:
            The report, equal on all ranks; None when there is nothing to resume.

        Raises:
            ValueError: `which` is none of these.
            CheckpointError: the step does not fit the state, which is unchanged then; ranks give
                other arguments, or their data differs; or reading failed in the middle, and the
                state may not be used before it is resumed again.
            CorruptCheckpoint: steps are there, and all are damaged.
            UnsafeFile: another tool's pickle that would run code; nothing was run.
            RankError: a rank died or failed in an unforeseen way.

        Example::

            state = anyrank.TrainState(torch.nn.Linear(4, 1))
            with anyrank.Checkpoints("runs/a", state) as ckpts:
                assert ckpts.resume() is None
                ckpts.save()
                report = ckpts.resume("must")
            assert report.components == {"model": "exact", "streams": "exact"}
            with anyrank.Checkpoints("runs/b", state) as ckpts:
                report = ckpts.resume("runs/a")  # another run's newest step begins this one
        """
        self._signals.watch()
        ranks = self._open("resume")
        arguments = ResumeArguments(which, skip, fresh, rename)
        arguments.agree(ranks)
        self.wait()
        return self._writer.resume(arguments, ranks)

    # -- the loop ---------------------------------------------------------------------------------

    def steps(self, *, until: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Go over the steps of the run's `ElasticLoader`, and save when due and at the end.

        A step counts when it is whole: its microbatches ran, and an optimizer of the state stepped.
        However the body is left then, by `break`, `return` or an exception, the step counts; one
        that is left before comes again. An exception that leaves the `with` block saves nothing.
        Goes from epoch to epoch; a run that is at its end already gets no step. All ranks.

        Args:
            until: optimizer steps of the whole run, earlier processes included.
            epochs: epochs of the whole run; give this or `until`.

        Returns:
            The steps, each to be trained with `step.microbatches(model)`.

        Raises:
            ValueError: no limit, both, a negative one; fused=True with exact=True and FSDP2.
            TypeError: the state's data is not an ElasticLoader; a limit that is not an int.
            CheckpointError: ranks give other limits; or a save failed: the last one is still there.

        Example::

            loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2)
            model = torch.nn.Linear(4, 1)
            ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(model, data=loader))
            for step in ckpts.steps(epochs=1):
                for batch in step.microbatches(model):
                    step.backward(model(batch).sum())
            assert ckpts.saved()[0].samples == 8
        """
        loader, is_finished = loader_of(self._state), stop_condition(self._state, until, epochs)
        limits = {"until": until, "epochs": epochs}
        return Loop(lambda: self._loop(loader, is_finished, limits))

    def _loop(
        self, loader: ElasticLoader, is_finished: Callable[[], bool], limits: Mapping[str, object]
    ) -> Generator[Step, None, None]:
        self._signals.watch()
        self._counter.leave_body()  # of a loop whose iterator is still held
        ranks, state = self._open("steps"), self._state
        same_arguments(ranks, "steps", limits, CheckpointError, run_parts(state).check_usable)
        self._is_training = True
        with StepHooks(self._state) as hooks:
            while not is_finished():
                for step in loader:
                    self._counter.enter_body(step, hooks)
                    try:
                        yield step
                    except GeneratorExit:
                        self._counter.leave_body()
                        raise
                    self._counter.end_body(step)
                    self.step_done()
                    if is_finished():
                        break
        if self._counter.completed:
            self.save(unless_saved=True)

    def step_done(self) -> None:
        """Complete an optimizer step in a loop of one's own, and save when due. All ranks.

        Learns here, on all ranks together, of a background save that failed, and of SIGTERM (a
        last save, then SystemExit) and SIGUSR1 (a save) that any rank got.

        Raises:
            CheckpointError: the step is not complete, and counts on no rank; or replicas differ; or
                a save failed, and the last committed step is still there.

        Example::

            state = anyrank.TrainState(torch.nn.Linear(4, 1))
            with anyrank.Checkpoints("runs/a", state, every=2) as ckpts:
                while state.step < 5:
                    ckpts.step_done()  # after optimizer.step()
            assert [saved.step for saved in ckpts.saved()] == [5, 4, 2]
        """
        self._signals.watch()
        ranks = self._open("step_done")
        self._is_training = True

        def here() -> BoundaryReport:
            self._counter.check_countable()
            return BoundaryReport(self._writer.failed, self._signals.take(), self._writer.due())

        with self._counter.at_boundary():
            reports = ranks.together("completing the step", here)
            self._counter.count()
        if not self._has_stepped:
            self._has_stepped = True
            self._writer.warn_of_refusal(ranks)
        mine, due = reports[ranks.index], reports[0].due  # the first rank's clock decides
        signals = {report.signal for report in reports} - {None}
        try:
            if any(report.save_failed for report in reports):
                self.wait()
            if ranks.size > 1 and self._options.compares(self._state.step):
                check_replicas(self._state, ranks)
            if due.snapshot:
                self._writer.remember(ranks)
            if due.save or signals:
                self.save(unless_saved=True)
            else:
                self._writer.renew_lock()
        except AnyrankError:
            if mine.signal is not None:
                self._signals.give_back(mine.signal)  # still to be done, at the next boundary
            raise
        if signal.SIGTERM in signals:
            self.close()
            log.warning("SIGTERM: step %d is saved, and the run ends here", self._state.step)
            raise SystemExit(128 + signal.SIGTERM)

    # -- save -------------------------------------------------------------------------------------

    def save(self, *, unless_saved: bool = False) -> None:
        """Save now, at a step boundary; with background=True, return after a copy. All ranks.

        Args:
            unless_saved: leave a step that is saved already as it is, as the end of a loop does.
                Otherwise a warning says that it is left: a step is saved once.

        Raises:
            CheckpointError: something cannot be saved, a rank could not write, or the call comes
                within a step. Nothing is committed then, and no earlier step is touched.

        Example::

            ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(4, 1)))
            ckpts.save()
            ckpts.wait()  # with background=True: until it is committed
            assert ckpts.latest() == "runs/a/step-00000000"
            assert ckpts.stats()[0].nbytes == ckpts.saved()[0].nbytes
            ckpts.close()
        """
        ranks = self._open("save")
        self._writer.save(ranks, self._writers, unless_saved)
        self._writer.last_save = time.monotonic()

    def wait(self) -> None:
        """Return when no save is in flight. All ranks.

        Raises:
            CheckpointError: the save that was in flight failed.
        """
        if self._ranks is not None:
            self._writer.wait(self._ranks)

    def latest(self) -> str | None:
        """Path of the newest committed step, or None. Any rank."""
        steps = self._folder.whole()
        return self._folder.shown(steps[0].name) if steps else None

    def saved(self) -> list[SavedStep]:
        """The committed steps, the newest first; damaged ones are left out. Any rank."""
        return self._folder.saved()

    def stats(self) -> list[SaveRecord]:
        """The saves of this process: step, path, bytes, seconds, stall seconds, removed steps."""
        return [*self._writer.records]

    def _open(self, call: str) -> Ranks:
        """The ranks; on the first call, opened together."""
        if self._ranks is None:
            opened = open_ranks(self._process_group, f"Checkpoints.{call}()")
            ranks = self._groups.enter_context(opened)
            same_arguments(ranks, "Checkpoints", vars(self._options), CheckpointError)
            check_same_on_ranks(self._state.data, ranks)
            run_parts(self._state).agree(ranks)
            if self._options.background:
                # The writing thread's collectives must not mix with those of the main one.
                self._writers = self._groups.enter_context(ranks.apart("the background save"))
            self._writer.open(ranks)
            self._ranks = ranks
        return self._ranks

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
        self._signals.pass_on()

    def _release(self) -> None:
        self._signals.restore()
        self._writer.release()
        self._ranks = self._writers = None
        self._groups.close()

    def __enter__(self) -> Checkpoints:
        self._signals.watch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._counter.leave_body()  # of a loop whose iterator is still held
            if error is not None:
                self._writer.leave(self._ranks is not None and self._ranks.index == 0)
                return
            if self._is_training and self._ranks is not None and self._has_whole_steps(self._ranks):
                self.save(unless_saved=True)
            self.wait()
        finally:
            self._release()
        self._signals.pass_on()

    def _has_whole_steps(self, ranks: Ranks) -> bool:
        """Whether there is a step to save on leaving. All ranks.

        Raises:
            CheckpointError: a step moved the state of some rank, and does not count.
        """

        def here() -> tuple[bool, bool]:
            run_parts(self._state).check_usable()
            return self._counter.completed > 0, self._writer.is_within_step

        flags = ranks.together("leaving the loop", here)
        if any(is_within for _, is_within in flags):
            log.warning(
                "step %d was begun and not completed, so nothing is saved on leaving: the newest "
                "checkpoint stays the one before",
                self._state.step,
            )
            return False
        return any(has_counted for has_counted, _ in flags)
