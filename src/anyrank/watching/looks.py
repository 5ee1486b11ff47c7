"""The look of a rank at itself when no rank makes steps: its stack for two seconds, and its calls.

The frames of the main thread and the counters of the system show whether the rank stands still. A
look does not wake a thread that waits in C, so that thread takes no CPU time.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from anyrank.watching.recorder import (
    Call,
    calls_of,
    note_line,
    own_calls,
    read_entries,
    switched_off,
)
from anyrank.watching.stacks import (
    Frame,
    Stack,
    collective_of,
    is_own,
    own_frames,
    read_faulthandler,
)
from anyrank.watching.system import (
    ENDED,
    IN_KERNEL,
    STOPPED,
    Workers,
    bytes_moved,
    catches,
    core_times,
    end_of,
    oom_kills,
    pid_namespace,
    seconds_wanted,
    state_of,
)
from anyrank.wording import count
from anyrank.world.device import boot_id

LOOKS = 20
PAUSE_SEC = 0.1
BUSY = 0.2  # cores; a polling thread takes less
STANDS = 0.8  # share of samples at one place for a thread to stand still; and of the limit
MOVED_BYTES = 1 << 20  # read from and written to files
MOST_CHARACTERS = 6000  # per rank, of its stacks in a report
WORKER_LOOP = "_worker_loop"  # in torch; frames outside of it belong to the parent
MOST_WORKERS = 8  # DataLoader workers that are inspected per rank
SIGNAL_SEC = 1.5  # for a stack requested by a signal
WRITE_SEC = 0.3  # until a stack is written completely; also the pause between two stacks
THREAD = re.compile(r"\b0x([0-9a-f]+)(?=.*\(most recent)")
T = TypeVar("T")
Functions = tuple[tuple[str, str, int], ...]


@dataclass
class Look:
    """The state of one rank at one time.

    Attributes:
        rank: the rank.
        state: "answers", or why the rank does not: "killed", "lost" (on another machine),
            "stopped", "gil", "no core", "left" (it closed its watch or group), "absent" (it never
            called watch).
        stack: the stack of the main thread, the innermost frame first; empty if unknown.
        at_work: whether the rank moves, reads, writes or computes.
        is_busy: whether the rank uses a core, or waits for one.
        has_finished: whether the main thread has ended.
        dead_workers: texts about DataLoader workers that were killed.
        workers: texts about the positions of live DataLoader workers.
        recorder: the variable that has disabled the flight recorder, or "".
        calls: the calls of the rank, the oldest first.
        detail: a text about a signal, an exit code or a limit.
        text: the stacks of all threads. Threads are numbered, because their addresses differ
            between ranks in the same state.
    """

    rank: int
    state: str = "answers"
    stack: Stack = ()
    at_work: bool = False
    is_busy: bool = False
    has_finished: bool = False
    dead_workers: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    recorder: str = ""
    detail: str = ""
    text: str = ""

    def to_json(self) -> str:
        """Return the look as text for the store; the same text for ranks in the same state."""
        plain = asdict(self)
        del plain["rank"]
        for call in plain["calls"]:
            del call["time_ns"]
        return json.dumps(plain)

    @staticmethod
    def from_json(rank: int, text: str) -> Look:
        """Rebuild the look of a rank from its text."""
        plain: dict[str, Any] = json.loads(text)
        plain["stack"] = tuple(Frame(*frame) for frame in plain["stack"])
        plain["calls"] = [Call(**call) for call in plain["calls"]]
        return Look(rank, **plain)


def look_at_process(rank: int, pid: int) -> Look:
    """Return a look at the rank that runs in a process of this machine, from its state only."""
    state = state_of(pid)
    if not state or state in ENDED:
        return Look(rank, "killed", detail=end_of(pid))
    if state in STOPPED:
        return Look(rank, "stopped", detail=f"process {pid}: kill -CONT {pid}")
    return Look(rank)


class SelfObserver:
    """The rank's observer of its own process, with a memory file for its stacks.

    Other processes of this machine read the file by its descriptor: on a signal, `faulthandler`
    writes to it without the GIL, which a call into C may hold forever.

    Args:
        rank: the rank of this process.
        ticks: number of ticks in the time without a step that counts as a hang.
    """

    def __init__(self, rank: int, ticks: int) -> None:
        self.rank = rank
        # Positions of the main thread, one per tick.
        self.recent_positions = collections.deque[Functions](maxlen=ticks)
        self.file = os.memfd_create("anyrank-stacks")
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self.file, all_threads=True)
        self.workers = Workers()
        self.killed_before = oom_kills()
        main = threading.main_thread()
        self.main, self.thread = main.ident or 0, main.native_id or os.getpid()

    def close(self) -> None:
        """Release the signal and the file."""
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self.file)

    def describe(self) -> dict[str, Any]:
        """Return the values that `look_from_outside` needs in another process.

        The process id is valid only within this boot and this namespace.
        """
        process = {"pid": os.getpid(), "boot": boot_id(), "pid_namespace": pid_namespace()}
        return process | {"file": self.file, "signal": self.signal, "main": self.main}

    def tick(self) -> None:
        """Record the position of the main thread, and the worker processes."""
        self.workers.tick()
        self.recent_positions.append(_functions(read_faulthandler(self._dump()).get(self.main, ())))

    def look(self, pause: Callable[[float], None]) -> Look:
        """Look at this process for two seconds.

        Does not read the stacks of recorded calls: for the first one, torch imports its compiler,
        which takes a second of CPU time. `read_calls` reads them when they are needed.

        Args:
            pause: a function that waits for a number of seconds.
        """
        stacks: list[Stack] = []
        before = calls_of(read_entries(with_stacks=False, is_still=False))
        start, wanted, moved = time.monotonic(), seconds_wanted(self.thread), bytes_moved()
        text = ""
        for _ in range(LOOKS):
            pause(PAUSE_SEC)
            text = self._dump()
            moved += 2 * len(text)  # bytes written and read
            stacks.append(read_faulthandler(text).get(self.main, ()))
        is_busy = seconds_wanted(self.thread) - wanted > BUSY * (time.monotonic() - start)
        after = calls_of(read_entries(with_stacks=False, is_still=False))
        stack = _most_common(stacks)
        calls = calls_of(read_entries(with_stacks=False, is_still=len({*stacks}) == 1))
        note_line(calls, stack)
        calls += own_calls(stack)
        is_waiting = any(not call.is_done for call in calls)
        waiting_in = collective_of(stack)
        reads = bytes_moved() - moved > MOVED_BYTES and not waiting_in
        # Without a pending call, a wait that uses a core is a wait for the device of the rank.
        computes = is_busy and waiting_in.endswith("()") and not is_waiting and not switched_off()
        at_work = reads or computes or after != before or works(stacks, is_busy, is_waiting)
        # A pause after work must last as long as the limit before it counts.
        at_work |= self.recent_positions.count(_functions(stack)) < STANDS * len(
            self.recent_positions
        )
        kills = oom_kills() - self.killed_before
        return Look(
            self.rank,
            stack=stack,
            at_work=at_work,
            is_busy=is_busy,
            has_finished=not threading.main_thread().is_alive(),
            dead_workers=self.workers.find_dead(),
            workers=[] if at_work or is_waiting or waiting_in else self._workers_at(pause),
            calls=calls,
            recorder=switched_off(),
            detail=f"its cgroup killed {count(kills, 'process', 'processes')} for memory"
            if kills
            else "",
            text=_numbered(text[-MOST_CHARACTERS:]),
        )

    def read_calls(self) -> Look:
        """Return the calls of this rank with their stacks, and how it reached its pending call."""
        stack = read_faulthandler(self._dump()).get(self.main, ())
        is_still = _functions(stack) == (self.recent_positions or [()])[-1]
        calls = calls_of(read_entries(with_stacks=True, is_still=is_still))
        return Look(self.rank, calls=calls + own_calls(stack))

    def _workers_at(self, pause: Callable[[float], None]) -> list[str]:
        """Return texts with the lines of user code that the DataLoader workers are at."""
        process = self.describe()
        pids = sorted(self.workers.known)[:MOST_WORKERS]
        forked = [
            pid for pid in pids if self.signal and catches(pid, self.signal)
        ]  # after this watch
        lines: list[str] = []
        texts = _stacks_by_signal({pid: process | {"pid": pid} for pid in forked}, pause)
        for pid, text in texts.items():
            inner = itertools.takewhile(
                lambda frame: frame.function != WORKER_LOOP,
                next(iter(read_faulthandler(text).values()), ()),
            )
            lines += [
                f"worker process {pid} is at {frame}" for frame in own_frames(tuple(inner))[:1]
            ]
        return lines

    def _dump(self) -> str:
        """Return the stacks of all threads, as `faulthandler` writes them."""
        os.lseek(self.file, 0, os.SEEK_SET)
        os.ftruncate(self.file, 0)
        faulthandler.dump_traceback(file=self.file, all_threads=True)
        return os.pread(self.file, 1 << 20, 0).decode(errors="replace")


def look_from_outside(
    processes: Mapping[int, dict[str, Any]], pause: Callable[[float], None]
) -> dict[int, Look]:
    """Look at ranks on this machine that do not answer, all at once, through the system.

    Args:
        processes: rank -> the values of its `SelfObserver.describe`.
        pause: a function that waits for a number of seconds.
    """
    looks = {rank: look_at_process(rank, int(p["pid"])) for rank, p in processes.items()}
    silent = {rank: p for rank, p in processes.items() if looks[rank].state == "answers"}
    pids = {rank: int(process["pid"]) for rank, process in silent.items()}
    start = time.monotonic()
    before = {rank: core_times(pid, pid) for rank, pid in pids.items()}
    first = _stacks_by_signal(silent, pause)
    second = _stacks_by_signal({rank: silent[rank] for rank in first}, pause)
    seconds = time.monotonic() - start
    for rank, process in silent.items():
        look, text = looks[rank], second.get(rank, "")
        look.state, look.text = "gil", _numbered(text)
        texts = first.get(rank, ""), text
        stacks = [read_faulthandler(dump).get(int(process["main"]), ()) for dump in texts]
        look.stack, look.at_work = stacks[1], stacks[0] != stacks[1]
        after = core_times(pids[rank], pids[rank])
        ran, waited = (now - then for now, then in zip(after, before[rank], strict=True))
        # Answering a signal needs no GIL: a process that does not answer has had no CPU time.
        is_deaf = bool(process["signal"]) and not text and state_of(pids[rank]) != IN_KERNEL
        if is_deaf or waited > max(ran, BUSY * seconds):
            look.state, look.at_work = "no core", False
    return looks


def _stacks_by_signal(
    processes: Mapping[T, dict[str, Any]], pause: Callable[[float], None]
) -> dict[T, str]:
    """Send signals to processes, and return the stacks that they write in time.

    The processes write them even if a thread holds the GIL.
    """
    asked: dict[T, tuple[str, int]] = {}
    for key, process in processes.items():
        path = f"/proc/{process['pid']}/fd/{process['file']}"
        with contextlib.suppress(OSError):
            if process["signal"]:
                asked[key] = path, os.stat(path).st_mtime_ns
                os.kill(int(process["pid"]), process["signal"])
    written: set[T] = set()
    deadline = time.monotonic() + SIGNAL_SEC
    while len(written) < len(asked) and time.monotonic() < deadline:
        pause(0.05)
        for key, (path, before) in asked.items():
            with contextlib.suppress(OSError):
                written |= {key} if os.stat(path).st_mtime_ns != before else set()
    if asked:
        pause(WRITE_SEC)
    texts: dict[T, str] = {}
    for key in written:
        with contextlib.suppress(OSError), open(asked[key][0], errors="replace") as file:
            text = file.read()
            texts[key] = text[max(text.rfind("Current thread"), 0) :]
    return texts


def _numbered(text: str) -> str:
    """Return a dump in which each thread has a number."""
    numbers: dict[str, int] = {}
    return THREAD.sub(lambda match: str(numbers.setdefault(match[1], len(numbers) + 1)), text)


def _most_common(stacks: list[Stack]) -> Stack:
    """Return the most frequent stack."""
    return collections.Counter(stacks).most_common(1)[0][0] if stacks else ()


def works(stacks: list[Stack], is_busy: bool, is_waiting: bool = False) -> bool:
    """Return whether a thread moves between functions, or computes in a library.

    A thread that moves between lines of one function is in a loop, which may be endless. A thread
    that takes little CPU time waits, and may wake up now and then to wait again.

    Args:
        stacks: stacks of the thread, in the order of time.
        is_busy: whether the thread uses a core, or waits for one.
        is_waiting: whether the rank has a pending collective: with a GPU, waiting uses a core.
    """
    common = _most_common(stacks)
    if is_busy and not is_waiting and common and not is_own(common[0]):
        return True
    positions = collections.Counter(map(_functions, stacks))
    if len(positions) < 2:
        return False
    return is_busy or positions.most_common(1)[0][1] < STANDS * len(stacks)


def _functions(stack: Stack) -> Functions:
    """Return a stack without the line of its innermost frame, because a loop changes it."""
    return tuple(
        (frame.file, frame.function, number and frame.line) for number, frame in enumerate(stack)
    )


def _free_signal() -> int:
    """Return a signal that has no handler; 0 if all have one."""
    for number in range(int(signal.SIGRTMAX) - 3, int(signal.SIGRTMIN) + 3, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return 0
