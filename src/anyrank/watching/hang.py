"""`anyrank.watch`: a job that hangs says which rank holds it up, and at which line.

One thread on each rank publishes how many steps it has made. When they stand still, the lowest rank
that answers has all of them look at themselves, looks at those of its machine that do not answer,
and concludes. Nothing of this waits for the main thread.
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
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from anyrank.errors import AnyrankError
from anyrank.training.steps.step_listeners import on_step
from anyrank.watching.looks import Eyes, Look, look_from_outside
from anyrank.watching.mismatch import CallDigests, calls_of_block
from anyrank.watching.options import EXIT_CODE, VERDICT, read_options
from anyrank.watching.ras import look_by_nccl
from anyrank.watching.slow import FIRST_SEC, SlowRanks
from anyrank.watching.system import descendants
from anyrank.watching.verdict import Verdict, conclude, conclude_mismatch
from anyrank.world.first_ranks import name_ranks
from anyrank.world.group import default_store, lacks_group
from anyrank.world.store import Store

log = logging.getLogger("anyrank.watching")

TICK_SEC = 1.0
SILENT_SEC = 5.0  # without a sign of life, after which a rank is looked at from outside
ANSWER_SEC = 4.0  # for a look beyond its own two seconds, on a busy machine
END_SEC = 4.0  # for the thread, at the end of the script
LEAVE_SEC = 2.0  # for all to hear of the exit: errors of sockets that close would follow it
AGAIN_SEC = 4.0  # between looks while somebody is at work
JOIN_SEC = 60.0  # for the other ranks' first sign of life, before a warning
LEFT = "left"  # the last sign of life of a rank whose watch has ended
RUNNING: list[Watching] = []  # the watch of this process, if there is one


def watch(after: str | float = "60s", *, exit: bool = False, report: str | None = None) -> Watching:
    """Have a job that hangs say which rank holds it up, and at which line. All ranks, once.

    To be called after `init_process_group`; it returns at once. A step is that of an optimizer, or
    of `Checkpoints.steps`. When no rank has made one for `after`, the stacks of all ranks are taken
    without stopping them. If nobody is at work, as in a long evaluation or a save, one screen on
    standard error names the rank, its line, and what the others wait in. Then the job goes on, or
    ends.

    Example::

        watching = anyrank.watch("60s")
        for _ in range(3):
            ...  # train
        watching.close()  # or the end of the script

    Args:
        after: time without a step: "60s", "10min", "1h", or seconds. More than the longest pause
            in which a rank legitimately waits in one place.
        exit: end all ranks with exit code 124 then.
        report: file to which the lowest rank that answers writes a JSON object: `culprits`, `kind`,
            `file`, `line`, `function`, `waiting`, `collective`, `stacks`. `kind` is one of skipped,
            order, mismatch, loader, worker, stopped, killed, gil, store, slow, ending.

    Returns:
        The watch. A second call while one runs changes nothing, warns, and returns the first.

    Raises:
        AnyrankError: torchrun has started several ranks, and they are in no group yet.
        ValueError, TypeError: `after` is no time, or the folder of `report` does not exist.
    """
    after_sec, path = read_options(after, exit, report)
    for watching in RUNNING:
        log.warning(
            "watch() was called again, and runs already after %g s: this call changes nothing",
            watching._after_sec,  # pyright: ignore[reportPrivateUsage]
        )
        return watching
    if lacks_group(None):
        raise AnyrankError(
            "watch() was called before the ranks are in a group: call it after init_process_group()"
        )
    return Watching(after_sec, exit, path)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_connection(has_group: bool) -> Any:
    """A connection to the ranks' store, which no call of another thread can block."""
    if not has_group:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    try:
        return default_store().clone()
    except (NotImplementedError, RuntimeError) as error:
        raise AnyrankError(
            f"watch() needs a store of its own, and that of the ranks has no clone(): {error}: "
            "call init_process_group() without store=, or with a TCPStore"
        ) from error


class Beat(NamedTuple):
    """A rank's last sign of life.

    Attributes:
        text: as the store has it: steps, seconds since the last, and what makes it a new one; LEFT;
            or "" without any.
        time: when it was heard first.
    """

    text: str = ""
    time: float = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the rank gives no sign of life, or none any more."""
        is_old = self.text != LEFT and time.monotonic() - self.time > SILENT_SEC
        return is_old or not self.text

    @property
    def lives(self) -> bool:
        """Whether the rank watches."""
        return not self.is_silent and self.text != LEFT

    @property
    def steps(self) -> int:
        """That the rank has made."""
        return int(self.text.split()[0]) if self.text and self.text != LEFT else 0

    @property
    def idle_sec(self) -> float:
        """Since the last step of a rank that lives."""
        return float(self.text.split()[1]) + time.monotonic() - self.time


class Watching:
    """A watch that runs. `close()` ends it; so does the end of the script.

    Args:
        after_sec: time without a step.
        exit: whether the ranks end then.
        report: absolute path of the file, or None.
    """

    def __init__(self, after_sec: float, exit: bool, report: str | None) -> None:
        self._after_sec, self._ends_job, self._report = after_sec, exit, report
        self._has_group = _has_group()
        self._rank = dist.get_rank() if self._has_group else 0
        self._size = dist.get_world_size() if self._has_group else 1
        connection = _own_connection(self._has_group)
        # Ranks count their watches in the job's store: a process may have been in other jobs.
        number = Store(connection, "anyrank-watch").count(f"watches of rank {self._rank}")
        self._store = Store(connection, f"anyrank-watch/{number}")
        self._stopped, self._woken = threading.Event(), threading.Event()
        self._slow = SlowRanks(self._store, self._rank, self._size, self._woken.set)
        self._digests = CallDigests(self._store, self._rank, self._size)
        self._tick_sec = min(TICK_SEC, after_sec / 4)
        self._eyes = Eyes(self._rank, self._stopped, round(after_sec / self._tick_sec))
        self._process = self._eyes.describe()
        self._verdict_file = os.memfd_create(
            VERDICT
        )  # for `anyrank stacks`, which may see no stacks
        self._steps, self._last_step = 0, time.monotonic()
        self._beats = [Beat()] * self._size
        self._last_order = 0  # that this rank has followed
        self._next_look = 0.0
        self._steps_at_verdict = -1  # of all ranks: one verdict for each hang
        self._has_warned = False
        Watching._count_steps()
        RUNNING.append(self)
        atexit.register(self.close)  # a daemon thread that is in C++ then would abort the process
        self._thread = threading.Thread(target=self._run, name="anyrank-hang", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch on this rank. Does nothing where it has ended."""
        self._slow.close()
        self._stopped.set()
        self._woken.set()
        self._thread.join(END_SEC)

    def __repr__(self) -> str:
        return f"<watch of rank {self._rank} after {self._after_sec:g} s>"

    @staticmethod
    @functools.cache
    def _count_steps() -> None:
        """Count the steps of this process from now on, for the watch that runs."""

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
            self._beat()  # at once: the GIL may be gone before the first tick
            pause_sec = self._tick_sec
            while self._pauses(pause_sec) and self._has_group == _has_group():
                self._tick()
                pause_sec = FIRST_SEC if self._slow.tick() else self._tick_sec
            self._store.set(f"beat/{self._rank}", LEFT)
        except Exception as error:  # of ours, which must not end in somebody's training
            name = type(error).__name__
            log.warning("the watch of rank %d ends: %s: %s", self._rank, name, error)
        finally:
            self._eyes.close()
            os.close(self._verdict_file)
            atexit.unregister(self.close)
            RUNNING.remove(self)

    def _pauses(self, seconds: float) -> bool:
        """Wait for the next look; whether there is one."""
        self._woken.wait(seconds)
        self._woken.clear()
        return not self._stopped.is_set()

    def _tick(self) -> None:
        self._eyes.tick()
        self._beat()
        if order := self._store.get("order"):
            self._follow(order)
        if differing := self._digests.tick():
            self._tell_mismatch(differing)
        if self._idle_sec() > self._after_sec / 2:
            self._listen()
            if self._is_first() and self._is_due():
                self._conclude()

    def _beat(self) -> None:
        """Give a sign of life."""
        text = f"{self._steps} {self._idle_sec():.3f} {time.monotonic()}"
        self._store.set(f"beat/{self._rank}", text)

    def _idle_sec(self) -> float:
        """Since this rank's last step."""
        return time.monotonic() - self._last_step

    def _follow(self, order: str) -> None:
        """Do what the first rank has told all ranks to do, once."""
        number, _, what = order.partition(" ")
        if int(number) <= self._last_order:
            return
        self._last_order = int(number)
        if what == "exit":
            self._exit()
        self._beat()  # the look takes time, and on a busy machine much
        self._store.set(f"look/{number}/{self._rank}", self._see(what).to_json())

    def _see(self, what: str) -> Look:
        """Look at this process, or at its calls of the block that an order names."""
        if what == "look":
            return self._eyes.look()
        return Look(self._rank, calls=calls_of_block(*json.loads(what)))

    # -- the others' signs of life ----------------------------------------------------------------

    def _listen(self) -> None:
        """Read all ranks' signs of life."""
        now = time.monotonic()
        keys = [f"beat/{rank}" for rank in range(self._size)]
        if self._store.has(keys):
            values = self._store.call(lambda store: store.multi_get(keys))
            texts = [value.decode() for value in values]
        else:
            texts = [self._store.get(key) for key in keys]
        self._beats = [
            beat if beat.text == text else Beat(text, now)
            for beat, text in zip(self._beats, texts, strict=True)
        ]
        missing = [rank for rank, text in enumerate(texts) if not text]
        limit_sec = min(JOIN_SEC, self._after_sec)
        if missing and not self._has_warned and self._idle_sec() > limit_sec:
            self._has_warned = True
            if self._is_first():
                log.warning(
                    "%s never called anyrank.watch: call it on every rank; of others no stack can "
                    "be had",
                    name_ranks(missing),
                )

    def _is_first(self) -> bool:
        """Whether this is the first rank that watches."""
        return not any(beat.lives for beat in self._beats[: self._rank])

    def _is_due(self) -> bool:
        """Whether no rank has stepped for the limit, and nothing was said of it."""
        is_new = self._all_steps() != self._steps_at_verdict and time.monotonic() >= self._next_look
        return is_new and self._all_idle_sec() >= self._after_sec

    def _all_steps(self) -> int:
        """Of all ranks together."""
        return sum(beat.steps for beat in self._beats)

    def _all_idle_sec(self) -> float:
        """Since the last step of any rank."""
        return min((beat.idle_sec for beat in self._beats if beat.lives), default=0.0)

    # -- a look, and what follows -----------------------------------------------------------------

    def _conclude(self) -> None:
        """Have all ranks look, conclude, and say it. The first rank alone."""
        beats, steps, idle_sec = self._beats, self._all_steps(), self._all_idle_sec()
        looks = self._gather("look")
        looks |= {rank: self._look_at(rank) for rank in range(self._size) if rank not in looks}
        self._listen()
        self._next_look = time.monotonic() + AGAIN_SEC
        silent = [rank for rank, look in looks.items() if look.state == "gil"]
        if any(self._beats[rank] != beats[rank] for rank in silent) or self._all_steps() != steps:
            return  # one was only late, or somebody has stepped meanwhile
        verdict = conclude([looks[rank] for rank in sorted(looks)], idle_sec)
        if verdict is None:
            return
        self._steps_at_verdict = steps
        if self._store.count(f"verdicts/{steps}") > 1:
            return  # another rank took this one for silent
        self._say(verdict)
        if self._ends_job:
            self._order("exit")

    def _tell_mismatch(self, differing: tuple[str, int]) -> None:
        """Have all ranks show their calls of a block that differs, and say it. The first rank."""
        self._listen()
        looks = self._gather(json.dumps(differing))
        verdict = conclude_mismatch([looks[rank] for rank in sorted(looks)])
        if verdict is None:  # the recorder had lost it meanwhile
            log.warning(
                "ranks have made different calls in group %s, by their digests", differing[0]
            )
        elif self._ends_job:
            self._say(verdict)
            self._order("exit")
        else:
            log.warning("%s", verdict.screen)

    def _order(self, what: str) -> int:
        """Tell all ranks what to do at their next tick; returns the order's number."""
        number = self._store.count("orders")
        self._store.set("order", f"{number} {what}")
        return number

    def _gather(self, what: str) -> dict[int, Look]:
        """What ranks see, this one included; those that do not answer in time are missing."""
        number = self._last_order = self._order(what)
        looks = {self._rank: self._see(what)}
        for rank, beat in enumerate(self._beats):
            if rank != self._rank and beat.text in ("", LEFT):
                looks[rank] = Look(rank, "left" if beat.text else "absent")
        end = time.monotonic() + ANSWER_SEC
        pending = {*range(self._size)} - looks.keys()
        while pending:
            for rank in pending:
                if text := self._store.get(f"look/{number}/{rank}"):
                    looks[rank] = Look.from_json(text)
            pending -= looks.keys()
            is_vain = all(self._beats[rank].is_silent for rank in pending)
            if is_vain or time.monotonic() > end or self._stopped.wait(0.1):
                break
        return looks

    def _look_at(self, rank: int) -> Look:
        """Look at a rank that does not answer: through the system, if it is on this machine."""
        process = json.loads(self._store.get(f"process/{rank}"))
        if any(self._process[key] != process[key] for key in ("boot", "pid_namespace")):
            return look_by_nccl(rank, self._size)
        return look_from_outside(rank, process)

    def _say(self, verdict: Verdict) -> None:
        """Print the screen, and write the report: whole, or not at all."""
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
            log.warning("the report %s cannot be written: %s", path, error.strerror)

    def _exit(self) -> None:
        """End this process, and those that it has started."""
        time.sleep(LEAVE_SEC)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sys.stderr.flush()
        os._exit(EXIT_CODE)
