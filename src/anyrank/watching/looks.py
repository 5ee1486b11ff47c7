"""A rank's look at itself when nobody steps: its stack over two seconds, and its pending call.

Two kinds of signs tell whether it stands still: its main thread's frames, and the system's
counters. A thread that waits in C is not woken by a look, so it takes no CPU time.
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
from anyrank.world.device import boot_id

LOOKS = 20
PAUSE_SEC = 0.1
BUSY = 0.2  # of a core; a polling thread takes less
STANDS = 0.8  # of the looks at the same place, by a thread that takes little time; of the limit too
MOVED_BYTES = 1 << 20  # of files
MOST_CHARACTERS = 6000  # of a rank's stacks in a report
WORKER_LOOP = "_worker_loop"  # torch's; frames outside of it are the parent's
MOST_WORKERS = 8  # of a rank's DataLoaders that are inspected
SIGNAL_SEC = 1.5  # for a stack requested by a signal
WRITE_SEC = 0.3  # until it is whole; and until a second one is another
THREAD = re.compile(r"\b0x([0-9a-f]+)(?=.*\(most recent)")
T = TypeVar("T")
Functions = tuple[tuple[str, str, int], ...]


@dataclass
class Look:
    """The state of one rank at one time.

    Attributes:
        rank: the rank.
        state: "answers", or why it does not: "killed", "lost" (on another machine), "stopped",
            "gil", "no core", "left" (its group), "absent" (it has never called watch).
        stack: its main thread's, the innermost frame first; empty if there is none.
        at_work: whether it moves, reads, writes or computes.
        is_busy: whether it wants a core.
        has_finished: whether its main thread has ended.
        dead_workers: processes of its DataLoaders that were killed, described.
        workers: positions of the living ones, described.
        recorder: the variable that has switched off the flight recorder.
        calls: its calls, the oldest first.
        detail: signal, exit code or limit, described.
        text: all threads' stacks. Threads are numbered there, because their addresses differ on
            ranks in the same state.
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
        """The look as text for the store; equal for ranks that see the same."""
        plain = asdict(self)
        del plain["rank"]
        for call in plain["calls"]:
            del call["time_ns"]
        return json.dumps(plain)

    @staticmethod
    def from_json(rank: int, text: str) -> Look:
        """Rebuild a rank's look from the store."""
        plain: dict[str, Any] = json.loads(text)
        plain["stack"] = tuple(Frame(*frame) for frame in plain["stack"])
        plain["calls"] = [Call(**call) for call in plain["calls"]]
        return Look(rank, **plain)


def look_at_process(rank: int, pid: int) -> Look:
    """Conclude from the state of a process of this machine on the rank that it is."""
    state = state_of(pid)
    if not state or state in ENDED:
        return Look(rank, "killed", detail=end_of(pid))
    if state in STOPPED:
        return Look(rank, "stopped", detail=f"process {pid}: kill -CONT {pid}")
    return Look(rank)


class SelfObserver:
    """A rank's view of itself, with the file that its stacks are written to.

    The file is in memory, and other processes of this machine read it by its number: a signal makes
    `faulthandler` write into it without the GIL, which a call into C may hold for ever.

    Args:
        rank: this process's rank.
        ticks: number of ticks in the time without a step that counts as a hang.
    """

    def __init__(self, rank: int, ticks: int) -> None:
        self.rank = rank
        self.recent_positions = collections.deque[Functions](
            maxlen=ticks
        )  # positions of the main thread, one per tick
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
        """The plain values that `look_from_outside` in another process needs.

        The process's id is valid only within this boot and this namespace.
        """
        process = {"pid": os.getpid(), "boot": boot_id(), "pid_namespace": pid_namespace()}
        return process | {"file": self.file, "signal": self.signal, "main": self.main}

    def tick(self) -> None:
        """Note the position of the main thread, and the worker processes."""
        self.workers.tick()
        self.recent_positions.append(_functions(read_faulthandler(self._dump()).get(self.main, ())))

    def look(self, pause: Callable[[float], None]) -> Look:
        """Look for two seconds at this process.

        Stacks of calls that the recorder has kept are left out: reading the first one makes torch
        import its compiler, which takes a second of CPU. `read_calls` reads them when they tell
        more.

        Args:
            pause: waits for some seconds.
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
        # Without a pending call, a wait that takes a core is for the rank's own device.
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
            detail=f"its cgroup killed {kills} for memory" if kills else "",
            text=_numbered(text[-MOST_CHARACTERS:]),
        )

    def read_calls(self) -> Look:
        """This rank's calls with their stacks, and how it arrived at its pending call."""
        stack = read_faulthandler(self._dump()).get(self.main, ())
        is_still = _functions(stack) == (self.recent_positions or [()])[-1]
        calls = calls_of(read_entries(with_stacks=True, is_still=is_still))
        return Look(self.rank, calls=calls + own_calls(stack))

    def _workers_at(self, pause: Callable[[float], None]) -> list[str]:
        """The positions of the worker processes of this rank's DataLoaders, in own lines."""
        process = self.describe()
        pids = sorted(self.workers.known)[:MOST_WORKERS]
        forked = [pid for pid in pids if self.signal and catches(pid, self.signal)]  # after us
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
        """All threads' stacks, as `faulthandler` writes them."""
        os.lseek(self.file, 0, os.SEEK_SET)
        os.ftruncate(self.file, 0)
        faulthandler.dump_traceback(file=self.file, all_threads=True)
        return os.pread(self.file, 1 << 20, 0).decode(errors="replace")


def look_from_outside(
    processes: Mapping[int, dict[str, Any]], pause: Callable[[float], None]
) -> dict[int, Look]:
    """Look at ranks of this machine that do not answer, through the system; all at once.

    Args:
        processes: for each of them, the values of its `SelfObserver.describe`.
        pause: waits for some seconds.
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
        # A signal is answered without the GIL: a process that does not answer has had no core.
        is_deaf = bool(process["signal"]) and not text and state_of(pids[rank]) != IN_KERNEL
        if is_deaf or waited > max(ran, BUSY * seconds):
            look.state, look.at_work = "no core", False
    return looks


def _stacks_by_signal(
    processes: Mapping[T, dict[str, Any]], pause: Callable[[float], None]
) -> dict[T, str]:
    """The stacks of processes that write them in time when they get a signal.

    They do so even while the GIL is held.
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
    """A dump in which each thread has a number."""
    numbers: dict[str, int] = {}
    return THREAD.sub(lambda match: str(numbers.setdefault(match[1], len(numbers) + 1)), text)


def _most_common(stacks: list[Stack]) -> Stack:
    """The stack that was seen most often."""
    return collections.Counter(stacks).most_common(1)[0][0] if stacks else ()


def works(stacks: list[Stack], is_busy: bool, is_waiting: bool = False) -> bool:
    """Return whether a thread goes from function to function, or computes in a library.

    Going from line to line in one function is a loop, which may be endless. A thread that takes
    little CPU time is waiting, and may wake up now and then to wait again.

    Args:
        stacks: stacks of the thread, one after the other.
        is_busy: whether it wants a core.
        is_waiting: whether a collective of its rank is not done: on a GPU, waiting takes a core.
    """
    common = _most_common(stacks)
    if is_busy and not is_waiting and common and not is_own(common[0]):
        return True
    positions = collections.Counter(map(_functions, stacks))
    if len(positions) < 2:
        return False
    return is_busy or positions.most_common(1)[0][1] < STANDS * len(stacks)


def _functions(stack: Stack) -> Functions:
    """A stack without the line of its innermost frame, because a loop changes it."""
    return tuple(
        (frame.file, frame.function, number and frame.line) for number, frame in enumerate(stack)
    )


def _free_signal() -> int:
    """A signal that nobody handles; 0 without one."""
    for number in range(int(signal.SIGRTMAX) - 3, int(signal.SIGRTMIN) + 3, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return 0
