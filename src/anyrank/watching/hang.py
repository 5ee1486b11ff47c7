"""`anyrank.watch`: find the rank that blocks a job that hangs, and the line.

On each rank, a thread publishes the number of steps. When no rank makes steps, one rank, the judge,
asks all ranks to look at themselves, looks at those on its own machine that do not answer, and
reaches a verdict. The threads never wait for the main thread, and continue their heartbeats.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from anyrank.errors import AnyrankError
from anyrank.training.steps.step_listeners import on_step
from anyrank.watching.beats import ABSENT, LEFT, Beats
from anyrank.watching.looks import Look, SelfObserver, look_from_outside
from anyrank.watching.mismatch import CallDigests, calls_of_block
from anyrank.watching.options import EXIT_CODE, VERDICT, read_options
from anyrank.watching.orders import CALLS, EXIT, LOOK, STACKS, Order, Orders
from anyrank.watching.ras import look_by_nccl
from anyrank.watching.slow import FIRST_SEC, SlowRanks
from anyrank.watching.system import descendants
from anyrank.watching.verdict import Verdict, conclude, conclude_mismatch
from anyrank.world.first_ranks import name_ranks
from anyrank.world.group import default_store, lacks_group
from anyrank.world.store import Store, StoreLost

log = logging.getLogger("anyrank.watching")

TICK_SEC = 1.0
LOOK_SEC = 6.0  # for the first answer: a tick, and a look of two seconds, on a busy machine
NEXT_SEC = 4.0  # for the next answer, while answers arrive
POLL_SEC = 0.2  # between reads of the answers
END_SEC = 4.0  # for the thread, at the end of the script
LEAVE_SEC = 10.0  # for all ranks to get the order to exit, before the first one exits
LAST_SEC = 2.0  # for the other ranks, before a rank exits that may host the store
AGAIN_SEC = 4.0  # between looks while a rank is at work
JOIN_SEC = 60.0  # for the first heartbeats of the other ranks, before a warning
STORE_SEC = 60.0  # for an answer of the store, whose process may share cores with many ranks
T = TypeVar("T")
RUNNING: list[Watching] = []  # the watch of this process, if one runs


def watch(after: str | float = "60s", *, exit: bool = False, report: str | None = None) -> Watching:
    """Watch for hangs: report which rank blocks the job, and on which line.

    Call it once on every rank, after `init_process_group`; it returns at once. A step is a step of
    an optimizer or of `Checkpoints.steps`. If no rank completes a step within `after`, the stacks
    of all ranks are read without stopping them. If no rank is at work, such as in a long evaluation
    or a save, a text on standard error names the rank that blocks the others, its line, and the
    call in which the others wait. Then the job continues, or ends.

    Example::

        watching = anyrank.watch("60s")
        for _ in range(3):
            ...  # train
        watching.close()  # the end of the script closes it too

    Args:
        after: time without a step: "60s", "10min", "1h", or a number of seconds. It must be longer
            than the longest pause in which a rank legitimately waits in one place.
        exit: whether to end all ranks with exit code 124 after the report.
        report: path of a file to which the lowest rank that answers writes a JSON object with the
            keys `culprits`, `kind`, `file`, `line`, `function`, `waiting`, `collective` and
            `stacks`. `kind` is one of skipped, order, mismatch, loader, worker, stopped, killed,
            gil, store, slow, ending.

    Returns:
        The watch. If one runs already, a call logs a warning, and returns that watch unchanged.

    Raises:
        AnyrankError: torchrun has started several ranks, but no process group is initialized yet.
        ValueError, TypeError: `after` is not a time, or the folder of `report` does not exist.
    """
    after_sec, path = read_options(after, exit, report)
    for watching in RUNNING:
        log.warning(
            "watch() is already running, after=%g s. This call has no effect",
            watching._after_sec,  # pyright: ignore[reportPrivateUsage]
        )
        return watching
    if lacks_group(None):
        raise AnyrankError(
            "watch() was called before the process group is initialized. Call it after "
            "init_process_group()"
        )
    return Watching(after_sec, exit, path)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_connection(has_group: bool) -> Any:
    """Return a connection to the store of the ranks that no call of another thread can block."""
    if not has_group:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    try:
        return default_store().clone()
    except (NotImplementedError, RuntimeError) as error:
        raise AnyrankError(
            f"watch() needs its own connection to the store of the ranks, which has no clone() "
            f"({error}). Call init_process_group() without store=, or with a TCPStore"
        ) from error


class PatientStore(Store):
    """The store with a longer deadline, so that a busy machine does not end the watch."""

    def call(self, work: Callable[[Any], T], seconds: float | None = None) -> T:
        """Do what `Store.call` does, with a longer deadline."""
        return super().call(work, STORE_SEC if seconds is None else seconds)


class Watching:
    """A running watch. `close()` or the end of the script ends it.

    Args:
        after_sec: time without a step.
        exit: whether to end all ranks after a verdict.
        report: absolute path of the file for the report, or None.
    """

    def __init__(self, after_sec: float, exit: bool, report: str | None) -> None:
        self._after_sec, self._ends_job, self._report = after_sec, exit, report
        self._has_group = _has_group()
        self._rank = dist.get_rank() if self._has_group else 0
        self._size = dist.get_world_size() if self._has_group else 1
        connection = _own_connection(self._has_group)
        # Ranks count their watches in the store, because a process may have been in other jobs.
        number = Store(connection, "anyrank-watch").count(f"watches of rank {self._rank}")
        self._store = PatientStore(connection, f"anyrank-watch/{number}")
        self._stopped, self._woken = threading.Event(), threading.Event()
        self._slow = SlowRanks(self._store, self._rank, self._size, self._woken.set)
        self._digests = CallDigests(self._store, self._rank, self._size)
        self._tick_sec = min(TICK_SEC, after_sec / 4)
        self._observer = SelfObserver(self._rank, round(after_sec / self._tick_sec))
        self._process = self._observer.describe()
        # For `anyrank stacks`, which may see no stacks.
        self._verdict_file = os.memfd_create(VERDICT)
        self._steps, self._last_step = 0, time.monotonic()
        self._beats = Beats(self._store, self._rank, self._size)
        self._orders = Orders(self._store, self._rank)
        self._last_beat = self._next_look = 0.0
        self._steps_at_verdict = -1  # steps of all ranks together: one verdict per hang
        self._has_warned = False
        Watching._count_steps()
        RUNNING.append(self)
        atexit.register(self.close)  # a daemon thread in C++ at exit would abort the process
        self._thread = threading.Thread(target=self._run, name="anyrank-hang", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch on this rank; does nothing if it has ended."""
        self._slow.close()
        self._stopped.set()
        self._woken.set()
        self._thread.join(END_SEC)

    def __repr__(self) -> str:
        return f"<watch of rank {self._rank} after {self._after_sec:g} s>"

    @staticmethod
    @functools.cache
    def _count_steps() -> None:
        """Count the steps of this process from now on, for a running watch."""

        def count(optimizer: Optimizer | None = None, *_: Any) -> None:
            for watching in RUNNING:
                watching._steps += 1
                watching._last_step = time.monotonic()
                if optimizer is not None:
                    watching._slow.step_made(optimizer)

        register_optimizer_step_post_hook(count)
        on_step(count)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store.set(f"process/{self._rank}", json.dumps(self._process))
            self._beat()  # at once, because a call may hold the GIL forever before the first tick
            pause_sec = self._tick_sec
            while self._pauses(pause_sec) and self._has_group == _has_group():
                self._tick()
                pause_sec = FIRST_SEC if self._slow.tick() else self._tick_sec
            self._beats.leave()
        except Exception as error:  # a bug of the watch must not end the user's training
            name = type(error).__name__
            log.warning("the watch of rank %d ended because of %s: %s", self._rank, name, error)
        finally:
            self._observer.close()
            os.close(self._verdict_file)
            atexit.unregister(self.close)
            RUNNING.remove(self)

    def _pauses(self, seconds: float) -> bool:
        """Wait for the next tick; return False if the watch is closed."""
        self._woken.wait(seconds)
        self._woken.clear()
        return not self._stopped.is_set()

    def _tick(self) -> None:
        self._observer.tick()
        self._beat()
        if order := self._orders.next():
            self._orders.answer(order, self._see(order))
            if order.what == EXIT:
                with contextlib.suppress(StoreLost):  # the rank that hosts it may have exited
                    self._store.wait([EXIT], LEAVE_SEC)
                self._exit()
        if differing := self._digests.tick():
            self._tell_mismatch(differing)
        if self._idle_sec() > self._after_sec / 2 and self._beats.find_judge():
            self._beats.listen()
            self._warn_of_absent()
            if self._is_due():
                self._judge()

    def _beat(self) -> None:
        """Publish a heartbeat."""
        self._last_beat = time.monotonic()
        self._beats.give(self._steps, self._idle_sec())

    def _pause(self, seconds: float) -> None:
        """Wait, and continue the heartbeats."""
        self._stopped.wait(seconds)
        if time.monotonic() > self._last_beat + self._tick_sec:
            self._beat()

    def _idle_sec(self) -> float:
        """Return the seconds since the last step of this rank."""
        return time.monotonic() - self._last_step

    def _see(self, order: Order) -> Look:
        """Carry out an order: look at this process, or read its calls."""
        if order.what == LOOK:
            return self._observer.look(self._pause)
        if order.what == EXIT:
            return Look(self._rank)
        if order.block:
            group, block = order.block
            calls = calls_of_block(str(group), int(block), with_stacks=order.what == STACKS)
            return Look(self._rank, calls=calls)
        return self._observer.read_calls()

    # -- the rank that judges ---------------------------------------------------------------------

    def _warn_of_absent(self) -> None:
        """Log once which ranks have no heartbeat because they never called `watch`."""
        missing = [rank for rank, beat in enumerate(self._beats.last) if beat.text == ABSENT]
        limit_sec = min(JOIN_SEC, self._after_sec)
        if missing and not self._has_warned and self._idle_sec() > limit_sec:
            self._has_warned = True
            log.warning(
                "%s never called anyrank.watch. Call it on every rank; no stack is available for "
                "ranks that do not",
                name_ranks(missing),
            )

    def _is_due(self) -> bool:
        """Return whether no rank has stepped within the limit, and no verdict exists yet."""
        is_new = self._beats.steps() != self._steps_at_verdict
        is_time = time.monotonic() >= self._next_look
        return is_new and is_time and self._beats.idle_sec() >= self._after_sec

    def _judge(self) -> None:
        """Ask all ranks to look, reach a verdict, and report it."""
        steps, idle_sec = self._beats.steps(), self._beats.idle_sec()
        looks = self._collect(LOOK, range(self._size))
        looks |= self._look_at_silent([r for r in range(self._size) if r not in looks])
        verdict = self._conclude(looks, idle_sec)
        if verdict is not None and verdict.unread:
            for rank, look in self._collect(STACKS, verdict.unread).items():
                looks[rank].calls = look.calls
            verdict = self._conclude(looks, idle_sec)
        self._beats.listen()
        self._next_look = time.monotonic() + AGAIN_SEC
        if verdict is None or self._beats.steps() != steps or not self._beats.find_judge():
            return  # a rank is at work, has made a step meanwhile, or has replaced this judge
        self._steps_at_verdict = steps
        if self._store.count(f"verdicts/{steps}") > 1:
            return  # the previous judge has reported it
        self._say(verdict)
        if self._ends_job:
            self._end_job()

    def _conclude(self, looks: dict[int, Look], idle_sec: float) -> Verdict | None:
        """Reach a verdict from the looks at all ranks."""
        return conclude([looks[rank] for rank in sorted(looks)], idle_sec)

    def _tell_mismatch(self, differing: tuple[str, int]) -> None:
        """Ask all ranks for their calls in a block that differs, and report it. Only on rank 0."""
        self._beats.listen()
        looks = self._collect(CALLS, range(self._size), differing)
        verdict = conclude_mismatch([looks[rank] for rank in sorted(looks)])
        if verdict is not None and verdict.unread:
            looks |= self._collect(STACKS, verdict.unread, differing)
            verdict = conclude_mismatch([looks[rank] for rank in sorted(looks)])
        if verdict is None:  # the recorder no longer has the calls
            log.warning(
                "ranks made different calls in group %s: their digests differ", differing[0]
            )
        elif self._ends_job:
            self._say(verdict)
            self._end_job()
        else:
            log.warning("%s", verdict.screen)

    def _collect(
        self, what: str, ranks: Sequence[int], block: Sequence[str | int] = ()
    ) -> dict[int, Look]:
        """Collect the looks of ranks that answer in time, including this one.

        Waits as long as answers arrive, and only for ranks that have a heartbeat.
        """
        order = self._orders.give(what, [] if len(ranks) == self._size else ranks, block)
        looks = {self._rank: self._see(order)} if self._rank in ranks else {}
        awaited = {rank for rank in ranks if self._beats.last[rank].watches} - {self._rank}
        answers: dict[int, str] = {}
        next_listen, end = 0.0, time.monotonic() + LOOK_SEC
        while awaited - answers.keys() and not self._stopped.is_set():
            before, now = len(answers), time.monotonic()
            answers = self._orders.answers(order)
            if len(answers) > before:
                end = max(end, now + NEXT_SEC)
            if now > next_listen:
                self._beats.listen()
                next_listen = now + self._tick_sec
            pending = awaited - answers.keys()
            if now > end or not any(self._beats.last[rank].lives for rank in pending):
                break
            self._pause(POLL_SEC)
        return looks | self._orders.take(order, answers)

    def _look_at_silent(self, ranks: Sequence[int]) -> dict[int, Look]:
        """Look at ranks that do not answer: from outside if on this machine, else by NCCL."""
        looks: dict[int, Look] = {}
        local: dict[int, dict[str, Any]] = {}
        beats = self._beats.last
        for rank in ranks:
            if not beats[rank].watches:
                looks[rank] = Look(rank, "left" if beats[rank].text == LEFT else "absent")
                continue
            process = json.loads(self._store.get(f"process/{rank}"))
            if any(self._process[key] != process[key] for key in ("boot", "pid_namespace")):
                looks[rank] = look_by_nccl(rank, self._size)
            else:
                local[rank] = process
        looks |= look_from_outside(local, self._pause)
        self._beats.listen()
        for rank, look in looks.items():
            if look.state in ("gil", "lost") and self._beats.last[rank].lives:  # only late
                looks[rank] = Look(rank, "no core", stack=look.stack, text=look.text)
        return looks

    def _say(self, verdict: Verdict) -> None:
        """Print the text of the verdict, and write the whole report or nothing."""
        print(verdict.screen, file=sys.stderr, flush=True)
        os.ftruncate(self._verdict_file, 0)
        os.pwrite(self._verdict_file, f"{time.strftime('%H:%M:%S')}\n{verdict.screen}".encode(), 0)
        path = self._report
        if path is None:
            return
        partial = f"{path}.{os.getpid()}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(f"{verdict.to_json()}\n")
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            log.warning("cannot write the report %s: %s", path, error.strerror)

    def _end_job(self) -> None:
        """End all ranks at once, because the remaining ranks would raise connection errors."""
        self._collect(EXIT, range(self._size))
        self._store.set(EXIT, "")
        time.sleep(LAST_SEC)
        self._exit()

    def _exit(self) -> None:
        """End this process and the processes that it has started."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sys.stderr.flush()
        os._exit(EXIT_CODE)
