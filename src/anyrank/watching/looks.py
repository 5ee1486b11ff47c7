"""What a rank sees of itself when nobody steps: its stack over two seconds, and what it waits in.

Two kinds of signs tell whether it stands: its main thread's frames, and what the system counts. A
thread that waits in C is not woken by a look, so it takes no time of a core.
"""

from __future__ import annotations

import collections
import faulthandler
import itertools
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from anyrank.watching.recorder import Call, calls_of, own_calls, read_entries, switched_off
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
    end_of,
    oom_kills,
    pid_namespace,
    seconds_wanted,
    state_of,
)
from anyrank.world.device import boot_id

LOOKS = 20
PAUSE_SEC = 0.1
BUSY = 0.2  # of a core; a thread that polls takes less
STANDS = 0.8  # of the looks at the same place, by a thread that takes little time; of the limit too
MOVED_BYTES = 1 << 20  # of files
MOST_CHARACTERS = 6000  # of a rank's stacks in a report
WORKER_LOOP = "_worker_loop"  # of torch; what is outside of it are the parent's lines
MOST_WORKERS = 8  # of a rank's DataLoaders, that are looked at
SIGNAL_SEC = 1.5  # for a stack that a signal asks for
Functions = tuple[tuple[str, str, int], ...]


@dataclass
class Look:
    """What is known of one rank at one time.

    Attributes:
        rank: it is of.
        state: "answers", or what keeps it from that: "killed", "lost" (on another machine),
            "stopped", "gil", "left" (its group), "absent" (it has never called watch).
        stack: of its main thread, the innermost frame first; empty where there is none.
        at_work: whether it moves, reads, writes or computes.
        is_busy: whether it wants a core.
        has_finished: whether its main thread has ended.
        dead_workers: processes of its DataLoaders that were killed, in words.
        workers: where those that live stand, in words.
        recorder: the variable that has switched the flight recorder off.
        calls: what it has called, the oldest first.
        detail: signal, exit code or limit, in words.
        text: all threads' stacks.
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
        """As text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Look:
        """Back from the store."""
        plain: dict[str, Any] = json.loads(text)
        plain["stack"] = tuple(Frame(*frame) for frame in plain["stack"])
        plain["calls"] = [Call(**call) for call in plain["calls"]]
        return Look(**plain)


def look_at_process(rank: int, pid: int) -> Look:
    """What the state of a process of this machine says of the rank that it is."""
    state = state_of(pid)
    if not state or state in ENDED:
        return Look(rank, "killed", detail=end_of(pid))
    if state in STOPPED:
        return Look(rank, "stopped", detail=f"process {pid}: kill -CONT {pid}")
    return Look(rank)


class Eyes:
    """A rank's view of itself, with the file that its stacks go into.

    The file is in memory, and other processes of this machine read it by its number: a signal makes
    `faulthandler` write into it without the GIL, which a call into C may hold for ever.

    Args:
        rank: this process's.
        stopped: set when there is no time left.
        ticks: in the time without a step that makes a hang.
    """

    def __init__(self, rank: int, stopped: threading.Event, ticks: int) -> None:
        self.rank, self.stopped = rank, stopped
        self.stood_in = collections.deque[Functions](maxlen=ticks)  # the main thread, at each tick
        self.file = os.memfd_create("anyrank-stacks")
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self.file, all_threads=True)
        self.workers = Workers()
        self.killed_before = oom_kills()
        main = threading.main_thread()
        self.main, self.thread = main.ident or 0, main.native_id or os.getpid()

    def close(self) -> None:
        """Let go of the signal and of the file."""
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self.file)

    def describe(self) -> dict[str, Any]:
        """What `look_from_outside` of another process needs, as plain values.

        The boot and the namespace are those within which the process's id means something.
        """
        process = {"pid": os.getpid(), "boot": boot_id(), "pid_namespace": pid_namespace()}
        return process | {"file": self.file, "signal": self.signal, "main": self.main}

    def tick(self) -> None:
        """Note where the main thread is, and which workers there are."""
        self.workers.tick()
        self.stood_in.append(_functions(read_faulthandler(self._dump()).get(self.main, ())))

    def look(self) -> Look:
        """Look for two seconds at this process."""
        stacks: list[Stack] = []
        before = calls_of(read_entries(with_stacks=False, is_still=False))
        start, wanted, moved = time.monotonic(), seconds_wanted(self.thread), bytes_moved()
        text = ""
        for _ in range(LOOKS):
            self.stopped.wait(PAUSE_SEC)
            text = self._dump()
            moved += 2 * len(text)  # that were written and read
            stacks.append(read_faulthandler(text).get(self.main, ()))
        is_busy = seconds_wanted(self.thread) - wanted > BUSY * (time.monotonic() - start)
        after = calls_of(read_entries(with_stacks=False, is_still=False))
        stack = _most_common(stacks)
        calls = calls_of(read_entries(with_stacks=True, is_still=len({*stacks}) == 1))
        calls += own_calls(stack)
        is_waiting = any(not call.is_done for call in calls)
        waiting_in = collective_of(stack)
        reads = bytes_moved() - moved > MOVED_BYTES and not waiting_in
        # Without a call under way, a wait that takes a core is for the rank's own device.
        computes = is_busy and waiting_in.endswith("()") and not is_waiting and not switched_off()
        at_work = reads or computes or after != before or works(stacks, is_busy, is_waiting)
        # A pause that follows on work is as long as the limit before it counts.
        at_work |= self.stood_in.count(_functions(stack)) < STANDS * len(self.stood_in)
        kills = oom_kills() - self.killed_before
        return Look(
            self.rank,
            stack=stack,
            at_work=at_work,
            is_busy=is_busy,
            has_finished=not threading.main_thread().is_alive(),
            dead_workers=self.workers.find_dead(),
            workers=[] if at_work or is_waiting or waiting_in else self._workers_at(),
            calls=calls,
            recorder=switched_off(),
            detail=f"its cgroup killed {kills} for memory" if kills else "",
            text=text[-MOST_CHARACTERS:],
        )

    def _workers_at(self) -> list[str]:
        """Where the worker processes of this rank's DataLoaders stand, of those in own lines."""
        lines: list[str] = []
        process = self.describe()
        for pid in sorted(self.workers.known - self.workers.dead.keys())[:MOST_WORKERS]:
            if self.signal and catches(pid, self.signal):  # was forked after the watch began
                stacks = read_faulthandler(_stacks_by_signal(pid, process)).values()
                inner = itertools.takewhile(
                    lambda frame: frame.function != WORKER_LOOP, next(iter(stacks), ())
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


def look_from_outside(rank: int, process: dict[str, Any]) -> Look:
    """Look at a rank of this machine that does not answer, as the system shows it.

    Args:
        rank: it is of.
        process: what its `Eyes.describe` said.
    """
    pid, main = int(process["pid"]), int(process["main"])
    look = look_at_process(rank, pid)
    if look.state == "answers":
        before, text = _stacks_by_signal(pid, process), _stacks_by_signal(pid, process)
        look.state, look.text = "gil", text
        look.stack = read_faulthandler(text).get(main, ())
        look.at_work = look.stack != read_faulthandler(before).get(main, ())
        # A signal is answered without the GIL: a process that does not has had no core.
        look.at_work |= bool(process["signal"]) and not text and state_of(pid) != IN_KERNEL
    return look


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


def _most_common(stacks: list[Stack]) -> Stack:
    """The stack that was seen most often."""
    return collections.Counter(stacks).most_common(1)[0][0] if stacks else ()


def works(stacks: list[Stack], is_busy: bool, is_waiting: bool = False) -> bool:
    """Whether a thread goes from function to function, or computes in a library.

    Going from line to line in one function is a loop, which may be endless. A thread that takes
    little time of a core waits, and may wake up now and then to wait again.

    Args:
        stacks: of the thread, one after the other.
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
    """A stack without the line of its innermost frame, at which a loop turns."""
    return tuple(
        (frame.file, frame.function, number and frame.line) for number, frame in enumerate(stack)
    )


def _free_signal() -> int:
    """A signal that nobody handles; 0 without one."""
    for number in range(int(signal.SIGRTMAX) - 3, int(signal.SIGRTMIN) + 3, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return 0
