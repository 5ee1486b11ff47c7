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
import math
import os
import signal
import sys
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from anyrank.errors import AnyrankError
from anyrank.steps.step_listeners import on_step
from anyrank.watching.judge import conclude
from anyrank.watching.looks import Eyes, Look, look_at_process, record_collectives
from anyrank.watching.options import EXIT_CODE, Options, read_options
from anyrank.watching.slow import FIRST_SEC, SlowRanks
from anyrank.watching.stacks import read_faulthandler
from anyrank.watching.system import descendants
from anyrank.world.group import default_store, name_ranks
from anyrank.world.processes import describe_own_process
from anyrank.world.store import Store

log = logging.getLogger("anyrank.watching")

TICK_SEC = 1.0
SILENT_SEC = 5.0  # without a sign of life, after which a rank is looked at from outside
ANSWER_SEC = 4.0  # for a look beyond its own two seconds, on a busy machine
VAIN_SEC = 1.5  # for ranks that give no sign of life anyway
SIGNAL_SEC = 1.5  # for a stack that a signal asks for
LEAVE_SEC = 2.0  # for all to have the verdict: errors of sockets that close would follow it
AGAIN_SEC = 4.0  # between looks while somebody is at work
JOIN_SEC = 60.0  # for the other ranks' first sign of life, before a warning


class Watching:
    """A watch that runs. `close()` ends it; so does the end of the script."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def close(self) -> None:
        """End the watch on this rank. Does nothing where it has ended."""
        self._watcher.end()

    def __repr__(self) -> str:
        return f"<watch of rank {self._watcher.rank} after {self._watcher.after_sec:g} s>"


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
        report: file to which the lowest waiting rank writes a JSON object: `culprits`, `kind`,
            `file`, `line`, `function`, `waiting`, `collective`, `stacks`. `kind` is one of skipped,
            order, mismatch, branch, swallowed, loader, worker, stopped, killed, gil, store, slow,
            ending.

    Returns:
        The watch. A second call while one runs changes nothing, warns, and returns the first.

    Raises:
        AnyrankError: torchrun has started several ranks, and they are in no group yet.
        ValueError, TypeError: `after` is no time, or the folder of `report` does not exist.
    """
    options = read_options(after, exit, report)
    if Watcher.running is not None:
        log.warning(
            "watch() was called again, and runs already after %g s: this call changes nothing",
            Watcher.running.after_sec,
        )
        return Watching(Watcher.running)
    if not _has_group() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise AnyrankError(
            "watch() was called before the ranks are in a group: call it after init_process_group()"
        )
    return Watching(Watcher(options))


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


@functools.cache
def _count_steps() -> None:
    """Count the steps of this process from now on, for the watch that runs."""

    def count(optimizer: Optimizer | None = None, *_: Any) -> None:
        if Watcher.running is not None:
            Watcher.running.count(optimizer)

    register_optimizer_step_post_hook(count)
    on_step(count)


class Watcher:
    """One rank's watch. All that follows `__init__` runs in its thread.

    Args:
        options: of `watch`.
    """

    running: Watcher | None = None
    calls = 0  # of watches in this process; ranks count alike

    def __init__(self, options: Options) -> None:
        self.after_sec, self.exit, self.report = options.after_sec, options.exit, options.report
        self.has_group = _has_group()
        self.rank = dist.get_rank() if self.has_group else 0
        self.size = dist.get_world_size() if self.has_group else 1
        Watcher.calls += 1
        record_collectives()
        self.store = Store(_own_connection(self.has_group), f"anyrank-watch/{Watcher.calls}")
        self.stopped, self.ended = threading.Event(), threading.Event()
        self.woken = threading.Event()
        self.slow = SlowRanks(self.store, self.rank, self.size, self.woken.set)
        self.eyes = Eyes(self.rank, self.stopped)
        self.steps, self.last_step = 0, time.monotonic()
        self.heard: dict[int, tuple[str, float]] = {}  # rank -> its last sign of life, and when
        self.hellos: dict[int, dict[str, Any]] = {}
        self.orders = 0  # that were followed
        self.looks = 0
        self.next_look = 0.0
        self.next_listen = 0.0
        self.said_at = -1  # all ranks' steps at the last verdict: one for each hang
        self.has_warned = False
        self.pid = os.getpid()
        _count_steps()
        self.tick_sec = min(TICK_SEC, self.after_sec / 4)
        Watcher.running = self
        atexit.register(self.end)  # a daemon thread that is in C++ then would abort the process
        threading.Thread(target=self._run, name="anyrank-hang", daemon=True).start()

    def end(self) -> None:
        """End the thread; its last sign of life says so to the others."""
        self.slow.close()
        self.stopped.set()
        self.woken.set()
        self.ended.wait(ANSWER_SEC)

    def count(self, optimizer: Optimizer | None) -> None:
        """A step was made, by an optimizer or of a run."""
        self.steps += 1
        self.last_step = time.monotonic()
        if optimizer is not None:
            self.slow.step_made(optimizer)

    @property
    def idle_sec(self) -> float:
        """Since this rank's last step."""
        return time.monotonic() - self.last_step

    def _run(self) -> None:
        try:
            self._say_hello()
            self._beat()  # at once: the GIL may be gone before the first tick
            tick_sec = self.tick_sec
            while self._pauses(tick_sec) and self.has_group == _has_group():
                self._tick()
                tick_sec = FIRST_SEC if self.slow.tick() else self.tick_sec
            self.store.set(f"beat/{self.rank}", "left")
        except Exception as error:  # of ours, which must not end in somebody's training
            log.warning("the watch of rank %d ends: %s: %s", self.rank, type(error).__name__, error)
        finally:
            self.eyes.close()
            atexit.unregister(self.end)
            Watcher.running = None
            self.ended.set()

    def _pauses(self, seconds: float) -> bool:
        """Wait for the next look; whether there is one."""
        self.woken.wait(seconds)
        self.woken.clear()
        return not self.stopped.is_set()

    def _say_hello(self) -> None:
        own = {**describe_own_process(), "file": self.eyes.file, "signal": self.eyes.signal}
        own |= {"main": self.eyes.main}
        self.hellos[self.rank] = own
        self.store.set(f"hello/{self.rank}", json.dumps(own))

    def _tick(self) -> None:
        self.eyes.workers.tick()
        self._beat()
        order = self.store.get("order")
        if order:
            self._follow(json.loads(order))
        if self.idle_sec > self.after_sec / 2 or time.monotonic() >= self.next_listen:
            self._listen()
            if self._is_judge() and self._is_due():
                self._judge()

    def _beat(self) -> None:
        """Give a sign of life."""
        self.store.set(f"beat/{self.rank}", f"{self.steps} {self.idle_sec:.3f} {time.monotonic()}")

    # -- the others' signs of life ----------------------------------------------------------------

    def _listen(self) -> None:
        """Read the other ranks' signs of life."""
        now = time.monotonic()
        is_needed = self.rank == 0 or len(self.hellos) < self.size
        self.next_listen = now + self.after_sec / 4 if is_needed else math.inf
        for rank, said in enumerate(self._beats()):
            if said and self.heard.get(rank, ("", 0.0))[0] != said:
                self.heard[rank] = said, now
        for rank in self.heard.keys() - self.hellos.keys():
            self.hellos[rank] = json.loads(self.store.get(f"hello/{rank}"))
        missing = [rank for rank in range(self.size) if rank not in self.heard]
        if missing and not self.has_warned and self.idle_sec > min(JOIN_SEC, self.after_sec):
            self.has_warned = True
            if self._is_judge():
                log.warning(
                    "%s never called anyrank.watch: call it on every rank; of others no stack can "
                    "be had",
                    name_ranks(missing),
                )

    def _beats(self) -> list[str]:
        """The last signs of life of all ranks; "" of those that have given none."""
        keys = [f"beat/{rank}" for rank in range(self.size)]
        if self.store.has(keys):
            return [said.decode() for said in self.store.call(lambda store: store.multi_get(keys))]
        return [self.store.get(key) for key in keys]

    def _has_left(self, rank: int) -> bool:
        return self.heard.get(rank, ("", 0.0))[0] == "left"

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank gives no sign of life."""
        said, when = self.heard.get(rank, ("", 0.0))
        return not said or (said != "left" and time.monotonic() - when > SILENT_SEC)

    def _is_judge(self) -> bool:
        """Whether no lower rank lives."""
        return all(self._is_silent(rank) or self._has_left(rank) for rank in range(self.rank))

    def _progress(self) -> dict[int, tuple[int, float]]:
        """Rank -> its steps, and the seconds since its last; of those that have not left."""
        now = time.monotonic()
        found: dict[int, tuple[int, float]] = {}
        for rank, (said, when) in self.heard.items():
            if said != "left":
                steps, idle, _ = said.split()
                found[rank] = int(steps), float(idle) + now - when
        return found

    def _steps(self) -> int:
        """Of all ranks together."""
        return sum(steps for steps, _ in self._progress().values())

    def _is_due(self) -> bool:
        """Whether no rank has stepped for the limit, and nothing was said of it."""
        idle = min((sec for _, sec in self._progress().values()), default=0.0)
        is_new = self._steps() != self.said_at
        return idle >= self.after_sec and is_new and time.monotonic() >= self.next_look

    # -- a look, and what follows -----------------------------------------------------------------

    def _judge(self) -> None:
        """Have all ranks look, conclude, and have the verdict said. The judge alone."""
        heard, before = dict(self.heard), self._steps()
        idle = min(sec for _, sec in self._progress().values())
        self.looks = self.store.count("orders")
        self._order({"look": self.looks})
        looks = {self.rank: self.eyes.look(self.steps)}
        looks |= self._gather(set(range(self.size)) - {self.rank})
        looks |= {rank: self._look_at(rank) for rank in range(self.size) if rank not in looks}
        self._listen()
        self.next_look = time.monotonic() + AGAIN_SEC
        held = [rank for rank, look in looks.items() if look.state == "gil"]
        if any(self.heard[rank] != heard[rank] for rank in held) or self._steps() != before:
            return  # one was only late, or somebody has stepped meanwhile
        verdict = conclude([looks[rank] for rank in sorted(looks)], idle)
        if verdict is None:
            return
        self.said_at = before
        if self.store.count(f"verdicts/{before}") > 1:
            return  # another rank took this one for silent
        writer = min(verdict.waiting, default=self.rank)
        said = {"writer": writer, "json": verdict.to_json(), "screen": verdict.screen}
        self._order({"verdict": self.looks, **said, "exit": self.exit})

    def _order(self, order: dict[str, Any]) -> None:
        """Tell all ranks what to do. The judge follows its own."""
        number = self.store.count("orders")
        self.store.set("order", json.dumps({"number": number, **order}))
        if "verdict" in order:
            self._follow({"number": number, **order})
        else:
            self.orders = number

    def _follow(self, order: dict[str, Any]) -> None:
        """Do what the judge has told all ranks to do."""
        if order["number"] <= self.orders:
            return
        self.orders = order["number"]
        if "look" in order:
            self._beat()  # the look takes time, and on a busy machine much
            own = self.eyes.look(self.steps)
            self.store.set(f"look/{order['look']}/{self.rank}", own.to_json())
        else:
            said = f"said/{order['verdict']}"
            if order["writer"] == self.rank:
                self._say(order["screen"], order["json"])
                self.store.set(said, "1")
            if order["exit"]:
                self.store.wait([said], ANSWER_SEC)
                time.sleep(LEAVE_SEC)
                self._exit()

    def _gather(self, ranks: set[int]) -> dict[int, Look]:
        """What the ranks have seen; those that do not answer in time are missing."""
        found: dict[int, Look] = {}
        start = time.monotonic()
        while not found.keys() >= ranks:
            is_vain = all(map(self._is_silent, ranks - found.keys()))
            if time.monotonic() > start + (VAIN_SEC if is_vain else ANSWER_SEC):
                break
            for rank in ranks - found.keys():
                if self._has_left(rank):
                    found[rank] = Look(rank, "left")
                elif rank not in self.heard:
                    found[rank] = Look(rank, "absent")
                elif said := self.store.get(f"look/{self.looks}/{rank}"):
                    found[rank] = Look.from_json(said)
            if self.stopped.wait(0.1):
                break
        return found

    def _look_at(self, rank: int) -> Look:
        """Look at a rank that does not answer: through the system, if it is on this machine."""
        if rank not in self.hellos:
            self.hellos[rank] = json.loads(self.store.get(f"hello/{rank}"))
        own, other = self.hellos[self.rank], self.hellos[rank]
        if any(own[key] != other[key] for key in ("boot", "pid_namespace")):
            return Look(rank, "lost")
        return _look_through_system(rank, other)

    def _say(self, screen: str, report: str) -> None:
        """Print the screen, and write the report: whole, or not at all."""
        print(screen, file=sys.stderr, flush=True)
        if self.report is None:
            return
        partial = f"{self.report}.{self.pid}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.write(f"{report}\n")
            os.replace(partial, self.report)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            log.warning("the report %s cannot be written: %s", self.report, error.strerror)

    def _exit(self) -> None:
        """End this process, and those that it has started."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _look_through_system(rank: int, process: dict[str, Any]) -> Look:
    """Look at a rank of this machine, by what it has said of its process, through the system."""
    pid = int(process["pid"])
    seen = look_at_process(rank, pid)
    if seen.state != "answers":
        return seen
    before, text = (_stacks_by_signal(pid, process) for _ in range(2))
    one, stack = (read_faulthandler(dump).get(int(process["main"]), ()) for dump in (before, text))
    return Look(rank, "gil", stack, at_work=one != stack, text=text)


def _stacks_by_signal(pid: int, process: dict[str, Any]) -> str:
    """A process's stacks, which a signal makes it write although the GIL is held; or ""."""
    path = f"/proc/{pid}/fd/{process['file']}"
    deadline = time.monotonic() + SIGNAL_SEC
    try:
        before = os.stat(path).st_mtime_ns
        if not process["signal"]:
            return ""
        os.kill(pid, process["signal"])
        while os.stat(path).st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # to its end; and for a second look to be another one
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    return text[text.rfind("Current thread") :] if "Current thread" in text else text
