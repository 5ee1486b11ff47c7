"""`anyrank.Checkpoints`: a run's loop, its saves (in `saving`) and resumes (in `resume`)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from anyrank.checks import check_function, check_path, check_type
from anyrank.errors import CheckpointError
from anyrank.files.storage import storage_for
from anyrank.runs.resume.agree import agree_on_run, become_writer
from anyrank.runs.resume.listeners import Listeners, open_listeners
from anyrank.runs.resume.loop import (
    BoundaryReport,
    BoundaryRow,
    Loop,
    StepCounter,
    join_reports,
    join_signals,
    require_loader,
    stop_condition,
)
from anyrank.runs.resume.options import ResumeArguments, SaveOptions
from anyrank.runs.resume.resume import resume_run
from anyrank.runs.resume.save_records import SaveRecords
from anyrank.runs.resume.signals import PendingSignals
from anyrank.runs.saving.background import BackgroundSave
from anyrank.runs.saving.collect import Snapshot, check_boundary, collect, warn_about_refusal
from anyrank.runs.saving.commit import SaveRecord, write_step
from anyrank.runs.saving.lock import RunLock
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.replicas import check_replicas
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.script_settings import Settings
from anyrank.runs.state.train_state import TrainState
from anyrank.sources.run_step import SavedStep
from anyrank.tensors.names import Rename
from anyrank.training.steps.loader import ElasticLoader
from anyrank.training.steps.step import Step
from anyrank.world.arguments import compare_arguments
from anyrank.world.failures import is_death
from anyrank.world.group import Group, check_group
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.resume")


class Checkpoints:
    """The checkpoints of one run, in one folder, and the loop that makes them.

    Every rank makes one with the same arguments, and calls it from one thread. Any rank may call
    `latest` and `saved`; all other methods are collective: every rank must call them.
    Leaving the `with` block saves the last completed step; leaving it by an exception does not.

    Args:
        path: a folder or URL for only this run; made if it does not exist.
        state: the state to save and resume.
        keep: number of newest steps to retain, at least 2.
        every: save interval: a number of steps (500 or "500") or a time ("10min"), measured on the
            first rank; None saves at the end, when asked, and on SIGTERM and SIGUSR1.
        background: pause training only while the state is copied; at most one save is pending.
        verify: compare every byte that a resume reads with its checksum; False: only the sizes of
            all files, and the checksums of the small ones.
        keep_every: steps that are multiples of it, or for which it returns True, are never removed.
        on_commit: called on the first rank with each `SaveRecord` once it is committed.
        peers: under `anyrank run`, keep a snapshot in the machines' memory after every step, for a
            restart to continue from; or at an interval of steps or time, as for `every`.
        replicas_every: interval in steps at which replicas of the model and the optimizers are
            compared in full; every save compares a part. An error names each difference.
        process_group: the ranks that take part, or `anyrank.ALONE` for this process. Default: all.

    Raises:
        TypeError: `state` is not a TrainState, or an argument has the wrong type.
        ValueError: an argument is not one of the values above.

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
        self._options = SaveOptions(
            self.path, keep, every, background, verify, keep_every, peers, replicas_every
        )
        self._folder = RunFolder(storage_for(self.path), self.path)
        self._state = state
        self._process_group = process_group
        self._groups = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        # It takes the path and not `self`, which would keep an unreferenced run and its signals.
        path = self.path
        self._signals = PendingSignals(lambda: f"{path}: step {state.step + 1}")
        self._lock = RunLock(self._folder.store, self._folder.absolute_path)
        self._background = BackgroundSave(self._write) if background else None
        self._counter = StepCounter(state)
        self._is_training = False  # whether a loop was started; the same on every rank
        self._has_stepped = False
        self._on_disk: tuple[int, str | None] | None = None  # step and run that were saved last
        self._branch: int | None = None  # the step that was resumed, if newer ones existed
        self._last_save = time.monotonic()
        self._records = SaveRecords(self.path, on_commit)
        self._listeners = Listeners()

    # -- resume -----------------------------------------------------------------------------------

    def resume(
        self,
        which: str | int | os.PathLike[str] = "auto",
        *,
        skip: Sequence[str] = (),
        fresh: Sequence[str] = (),
        drop: Sequence[str] = (),
        rename: Rename = None,
        parts: Mapping[str, str] | None = None,
        epoch: int | None = None,
        scheduler_steps: int | None = None,
        settings: Settings = "saved",
    ) -> ResumeReport | None:
        """Restore the run on the current number of ranks. Collective: every rank must call it.

        The newest undamaged step is restored; corrupt ones are renamed `.aside-...` and reported.
        Everything is compared before anything is changed. Random generators are restored last.

        A path inside this run selects that step; the run's own path selects the newest. Any other
        path starts this run from a checkpoint elsewhere: a step of another run, or of another tool.
        Everything that the state can use is restored, and the report lists the rest. Once the run
        has its own steps, these are resumed, so that a restarted job continues.

        Args:
            which: "auto": the newest, or None for an empty folder; "must": an empty folder is an
                error; a number: that step (the next save sets newer ones aside); a path or URL.
            skip: parts of the state that are not restored, or "random" for the generators; with a
                path, only when the run starts.
            fresh: parameters, by name or pattern such as "head.*", that may be missing from the
                checkpoint: they keep their values, and their optimizer state is reset.
            drop: parameters, by name or pattern, for which the checkpoint may hold values that the
                state no longer has, such as moments of layers that are frozen now.
            rename: for another tool's checkpoint, as for `load`: from its names to the model's.
            parts: for another tool's checkpoint: part of the state -> its name there.
            epoch: for another tool's checkpoint: number of completed epochs.
            scheduler_steps: for another tool's checkpoint: how many times the tool stepped its
                schedulers per optimizer step (Accelerate: once per process).
            settings: what to do if hyperparameters of schedulers and optimizers (T_max, lr, betas)
                differ between the script and the saved run: "saved" keeps the saved ones, "script"
                uses the script's, with schedulers at their counts. Each difference is a warning.

        Returns:
            The report, the same on every rank; None if there is nothing to resume.

        Raises:
            ValueError: `which` is none of these, or is a file of this run outside its steps.
            CheckpointError: the step does not match the state, which is unchanged; ranks differ in
                arguments or data; or reading failed midway, and the state must be resumed again.
            CorruptCheckpoint: the run has steps, and all of them are corrupt.
            UnsafeFile: another tool's pickle would run code; nothing was run.
            RankError: a rank died or failed in an unforeseen way.

        Example::

            state = anyrank.TrainState(torch.nn.Linear(4, 1))
            with anyrank.Checkpoints("runs/a", state) as ckpts:
                assert ckpts.resume() is None
                ckpts.save()
                report = ckpts.resume("must")
            assert report.components == {"model": "exact", "random": "exact"}
        """
        self._signals.watch()
        ranks = self._open("resume")
        arguments = ResumeArguments(
            which, skip, fresh, drop, rename, parts, epoch, scheduler_steps, settings
        )
        arguments.agree(ranks)
        self.wait()
        state, verify = self._state, self._options.verify
        open_search = self._listeners.open_search
        resumed = resume_run(state, self._folder, arguments, verify, ranks, open_search)
        if resumed is None:
            self._listeners.on_resume(None, None)
            state.parts.generators_before = state.parts.digests_of_generators()
            return None
        self._counter.forget_steps()
        is_on_disk = resumed.step is not None and resumed.step.is_on_disk
        self._on_disk = (state.step, state.run) if is_on_disk else None
        self._branch = state.step if resumed.is_branch else None
        return self._listeners.on_resume(resumed.report, resumed.step)

    # -- the loop ---------------------------------------------------------------------------------

    def steps(self, *, until: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Iterate over the steps of the run's `ElasticLoader`; save when due and at the end.

        A step counts once all its microbatches have run and an optimizer of the state has stepped,
        even if the body is then left by `break`, `return` or an exception. A step that is left
        earlier is repeated. An exception that leaves the `with` block saves nothing. Epochs follow
        one another; a finished run yields no steps. Collective: every rank must call it.

        Args:
            until: optimizer steps of the whole run, including earlier processes.
            epochs: epochs of the whole run; pass this or `until`.

        Returns:
            The steps, each to be trained with `step.microbatches(model)`.

        Raises:
            ValueError: no limit, both, or a negative one; fused=True with exact=True and FSDP2.
            TypeError: the state's data is not an ElasticLoader, or a limit is not an int.
            CheckpointError: limits differ between ranks; or a save failed: the last one is intact.

        Example::

            loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2)
            model = torch.nn.Linear(4, 1)
            ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(model, data=loader))
            for step in ckpts.steps(epochs=1):
                for batch in step.microbatches(model):
                    step.backward(model(batch).sum())
            assert ckpts.saved()[0].samples == 8
        """
        loader = require_loader(self._state)
        is_finished = stop_condition(self._state, until, epochs)
        return Loop(lambda: self._loop(loader, is_finished, {"until": until, "epochs": epochs}))

    def _loop(
        self, loader: ElasticLoader, is_finished: Callable[[], bool], limits: Mapping[str, object]
    ) -> Generator[Step, None, None]:
        self._signals.watch()
        self._counter.leave_body()  # that of an earlier loop whose iterator is still alive
        ranks, check = self._open("steps"), self._state.parts.check_usable
        compare_arguments(ranks, "steps", limits, CheckpointError, check)
        self._is_training = True
        yield from self._counter.go_over(loader, is_finished, self.step_done)
        if self._counter.completed:
            self.save(unless_saved=True)

    def step_done(self) -> None:
        """Complete an optimizer step in your own loop, and save when due. Collective: every rank
        must call it. Errors of a failed background save are raised here, and signals of any rank
        are handled: SIGTERM (a last save, then SystemExit) and SIGUSR1 (a save).

        Raises:
            CheckpointError: the step is not complete, and counts on no rank; or replicas differ; or
                a save failed, and the last committed step is intact.

        Example::

            state = anyrank.TrainState(torch.nn.Linear(4, 1))
            with anyrank.Checkpoints("runs/a", state, every=2) as ckpts:
                while state.step < 5:
                    ckpts.step_done()  # after optimizer.step(); in halves, ckpts.count_step()()
                    ckpts.end_if_asked()  # after each batch of a long evaluation
            assert [saved.step for saved in ckpts.saved()] == [5, 4, 2]
        """
        self.count_step()()

    def count_step(self) -> Callable[[], None]:
        """Count a step like `step_done`, and return a function that saves if a save is due. Code
        between these calls, such as a scheduler's step, is part of the step. Both are collective.
        """
        self._signals.watch()
        ranks = self._open("step_done")
        self._is_training = True
        options, number = self._options, self._state.step + 1

        def report() -> tuple[None, BoundaryRow]:
            self._counter.check_countable()
            return None, BoundaryReport(
                save_failed=self._background is not None and self._background.has_failed,
                signals=self._signals.pending(),
                save_is_due=options.cadence.is_due(number, self._last_save),
                ahead=self._counter.ahead(ranks.rank),
                news=self._listeners.tell(number),
                has_foreign_gradients=self._counter.has_foreign_gradients,
            ).row

        with self._counter.guard_boundary():
            _, row = ranks.run_and_reduce(
                "completing the step", report, partial(join_reports, self._listeners.join)
            )
            known = BoundaryReport(*row)
            self._counter.count()
            self._counter.learn_ahead(ranks, known.ahead)
        if not self._has_stepped:  # its optimizers have their state from this step on
            self._has_stepped = True
            warn_about_refusal(self._state, ranks)
        if known.save_failed:
            self.wait()
        if ranks.size > 1 and (known.has_foreign_gradients or options.compares_replicas(number)):
            check_replicas(self._state, ranks)
        return partial(self._end_step, known)

    def _end_step(self, known: BoundaryReport) -> None:
        """Do what is due after a step. Collective."""
        self._listeners.on_step(known.news)
        signals = {*known.signals}
        if known.save_is_due or signals:
            self._save_for(signals)

    def end_if_asked(self) -> None:
        """Stop the run if any rank has received SIGTERM: for long loops within a step, such as an
        evaluation. Every rank must call it, equally often; each call is one agreement.

        The last complete step is saved, and SystemExit raised. The current step is complete if an
        optimizer of the state has stepped: call this after everything that the step changes.

        Raises:
            CheckpointError: in the middle of a step of a state without an optimizer; or as `save`.
        """
        self._signals.watch()
        ranks = self._open("end_if_asked")
        signals = {*ranks.reduce("looking for SIGTERM", self._signals.pending(), join_signals)}
        if signal.SIGTERM in signals:
            self._counter.leave_step()
            self._save_for(signals)

    def _save_for(self, signals: Set[int]) -> None:
        """Save because it is due, or for a signal; end the run after SIGTERM. Collective."""
        self.save(unless_saved=True)
        self._signals.mark_done(signals)
        if signal.SIGTERM in signals:
            self.close()
            log.warning("SIGTERM: step %d is saved, and the run stops here", self._state.step)
            raise SystemExit(128 + signal.SIGTERM)

    # -- save -------------------------------------------------------------------------------------

    def save(self, *, unless_saved: bool = False) -> None:
        """Save now, at a step boundary; with background=True, return after a copy. Collective:
        every rank must call it.

        Args:
            unless_saved: do not warn if the step is already saved. It is not changed either way.

        Raises:
            CheckpointError: something cannot be saved, a rank could not write, or a step is not
                complete. Nothing is committed then, unless only the final fsync failed.
            RankError: another rank ended.

        Example::

            ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(4, 1)))
            ckpts.save()
            ckpts.wait()  # with background=True: until it is committed
            assert ckpts.latest() == "runs/a/step-00000000"
            ckpts.close()
        """
        ranks, state = self._open("save"), self._state
        start = time.perf_counter()
        self.wait()
        if (state.step, state.run) == self._on_disk:
            ranks.run("preparing a save", lambda: check_boundary(state))
            if ranks.index == 0:
                self._records.warn_about_saved(state, self._counter, always=not unless_saved)
        else:
            become = partial(become_writer, state, self._folder, self._lock, ranks)
            snapshot = collect(state, ranks, become)
            self._records.note_schedules(state)
            state.run = snapshot.manifest.run
            if self._background is None:
                record = self._write(snapshot, ranks)
                self._record_save(replace(record, stall_seconds=time.perf_counter() - start), ranks)
            else:
                self._background.start(snapshot, ranks, start)
        self._last_save = time.monotonic()
        self._listeners.on_save()

    def _write(self, snapshot: Snapshot, ranks: Ranks) -> SaveRecord:
        """Write a snapshot into files, in the main or the background thread. Collective."""
        record = write_step(
            snapshot,
            self._folder,
            ranks,
            keep_newest=self._options.keep,
            keeps_forever=self._options.is_kept_forever,
            branch=self._branch,
        )
        self._branch = None
        return record

    def _record_save(self, record: SaveRecord, ranks: Ranks) -> None:
        self._on_disk = (record.step, self._state.run)
        self._records.add(record, ranks)

    def wait(self) -> None:
        """Wait until no background save is pending. Collective: every rank must call it.

        Raises:
            CheckpointError: the pending save failed.
        """
        if self._background and self._ranks and self._background.is_in_flight:
            self._record_save(self._background.wait(), self._ranks)

    def latest(self) -> str | None:
        """Return the path of the newest committed step, or None. Any rank may call it."""
        steps = self._folder.whole_steps()
        return self._folder.user_path(steps[0].name) if steps else None

    def saved(self) -> list[SavedStep]:
        """Return the committed steps without corrupt ones, newest first. Any rank may call it."""
        return self._folder.saved()

    # -- open and close ---------------------------------------------------------------------------

    def _open(self, call: str) -> Ranks:
        """Return the ranks; the first call opens and checks the run. Collective."""
        if self._ranks is None:
            opened = open_ranks(self._process_group, f"Checkpoints.{call}()")
            ranks = self._groups.enter_context(opened)
            self._records.has_callback = agree_on_run(
                self._state, self._folder, self._options, ranks, self._records.has_callback
            )
            if self._background is not None:
                self._groups.enter_context(self._background.connected(ranks))
            self._listeners = open_listeners(
                self._state, self._folder, self._lock, self._options, ranks
            )
            self._ranks = ranks
        return self._ranks

    def close(self) -> None:
        """Wait for a pending save, and release the folder lock, signal handlers and process groups.

        Collective: every rank must call it. Does not save; leaving the `with` block does. A later
        call opens everything again.

        Raises:
            CheckpointError: the pending save failed; everything else is still released.
        """
        try:
            self.wait()
        finally:
            self._release()
        self._signals.resend()

    def _release(self, error: BaseException | None = None) -> None:
        self._signals.restore()
        self._listeners.close(error)
        self._lock.release()
        self._ranks = None
        self._groups.close()

    def __enter__(self) -> Checkpoints:
        self._signals.watch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._counter.leave_body()  # that of a loop whose iterator is still alive
            if error is not None:
                if self._background and self._ranks and self._background.is_in_flight:
                    add = partial(self._records.add_alone, ranks=self._ranks)
                    self._background.finish_for_error(add)
                if self._ranks is not None:  # the others may wait for this rank, which may live on
                    text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                    why = f"rank {self._ranks.rank} left the run because of {text}"
                    first = self._ranks.end(why, is_death(error))
                    # To torch a rank that failed looks like one that died: a closed connection.
                    error = first if first and is_death(error) else error
                return
            if self._is_training and self._ranks and self._counter.has_whole_steps(self._ranks):
                self.save(unless_saved=True)
            self.wait()
        finally:
            self._release(error)
        self._signals.resend()
