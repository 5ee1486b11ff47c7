"""What a rank sees of itself when nobody steps: its stack over two seconds, and what it waits in.

Two kinds of signs tell whether it stands: its main thread's frames, and what the system counts. A
thread that waits in C is not woken by a look, so it takes no time of a core.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from anyrank.watching.stacks import Frame, Stack, collective_of, is_own, read_faulthandler
from anyrank.watching.system import (
    ENDED,
    STOPPED,
    Workers,
    bytes_moved,
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
STANDS = 0.8  # of the looks at the same place, by a thread that takes little time
MOVED_BYTES = 1 << 20  # of files
MOST_CHARACTERS = 6000  # of a rank's stacks in a report
RECORDED = 200  # collectives that torch's flight recorder keeps
PASSED = 4  # of each group, that a look has
BUFFER = "TORCH_FR_BUFFER_SIZE"
SIGNAL_SEC = 1.5  # for a stack that a signal asks for


@dataclass
class Operation:
    """A collective, as torch's flight recorder has it.

    Attributes:
        group, number, name: the same on ranks that wait for each other in it.
        sizes: of its tensors, as text; empty where ranks may have others.
        is_done: whether it has ended on this rank.
    """

    group: str
    number: int
    name: str
    sizes: str
    is_done: bool


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
        operations: its newest collectives of each group, and the oldest that is not done.
        members: ranks of each group, where the recorder says so.
        detail: signal, exit code or limit, in words.
        text: all threads' stacks.
        steps: that it has made.
    """

    rank: int
    state: str = "answers"
    stack: Stack = ()
    at_work: bool = False
    is_busy: bool = False
    has_finished: bool = False
    dead_workers: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    members: dict[str, list[int]] = field(default_factory=dict)
    detail: str = ""
    text: str = ""
    steps: int = 0

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Look:
        """Back from the store."""
        plain: dict[str, Any] = json.loads(text)
        plain["stack"] = tuple(Frame(*frame) for frame in plain["stack"])
        plain["operations"] = [Operation(**operation) for operation in plain["operations"]]
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
    """

    def __init__(self, rank: int, stopped: threading.Event) -> None:
        self.rank, self.stopped = rank, stopped
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

    def look(self, steps: int) -> Look:
        """Look for two seconds at this process, which has made so many steps."""
        stacks: list[Stack] = []
        operations, _ = _recorded()
        start, wanted, moved = time.monotonic(), seconds_wanted(self.thread), bytes_moved()
        text = ""
        for _ in range(LOOKS):
            self.stopped.wait(PAUSE_SEC)
            text = self._dump()
            moved += 2 * len(text)  # that were written and read
            stacks.append(read_faulthandler(text).get(self.main, ()))
        is_busy = seconds_wanted(self.thread) - wanted > BUSY * (time.monotonic() - start)
        later, members = _recorded()
        stack = _most_common(stacks)
        is_waiting = any(not operation.is_done for operation in later)
        reads = bytes_moved() - moved > MOVED_BYTES and not collective_of(stack)
        kills = oom_kills() - self.killed_before
        return Look(
            self.rank,
            stack=stack,
            at_work=reads or later != operations or works(stacks, is_busy, is_waiting),
            is_busy=is_busy,
            has_finished=not threading.main_thread().is_alive(),
            dead_workers=self.workers.find_dead(),
            operations=later,
            members=members,
            detail=f"its cgroup killed {kills} for memory" if kills else "",
            text=text[-MOST_CHARACTERS:],
            steps=steps,
        )

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


def _functions(stack: Stack) -> tuple[Any, ...]:
    """A stack without the line of its innermost frame, at which a loop turns."""
    return tuple(
        (frame.file, frame.function, number and frame.line) for number, frame in enumerate(stack)
    )


def _recorded() -> tuple[list[Operation], dict[str, list[int]]]:
    """The collectives that torch's flight recorder shows, and the groups' ranks.

    Of each group the oldest that is not done and the newest; nothing where it does not answer.
    """
    # No public name: without it, the stacks alone say where a rank waits.
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    try:
        record: dict[str, Any] = json.loads(dump(True, False)) if dump else {}
    except (RuntimeError, TypeError, ValueError):
        return [], {}
    groups: dict[str, list[Operation]] = {}
    for entry in record.get("entries", []):
        if not entry.get("is_p2p"):
            operation = _read_operation(entry)
            groups.setdefault(operation.group, []).append(operation)
    members = {
        str(group["name"]): [int(text) for text in re.findall(r"\d+", str(group["ranks"]))]
        for group in record.get("pg_config", {}).values()
    }
    operations: list[Operation] = []
    for calls in groups.values():
        oldest = next((call for call in calls if not call.is_done), calls[-1])
        operations += [oldest, *(call for call in calls[-PASSED:] if call is not oldest)]
    return operations, members


def _read_operation(entry: dict[str, Any]) -> Operation:
    """A collective from the recorder's entry."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    is_done = bool(entry["retired"]) or entry["state"] == "completed"
    sizes = "" if "all_to_all" in name else json.dumps(entry.get("input_sizes", []))
    group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
    return Operation(group, number, name, sizes, is_done)


def record_collectives() -> None:
    """Have torch's flight recorder keep the newest collectives, unless the user has set it."""
    os.environ.setdefault(BUFFER, str(RECORDED))


def _free_signal() -> int:
    """A signal that nobody handles; 0 without one."""
    for number in range(int(signal.SIGRTMAX) - 3, int(signal.SIGRTMIN) + 3, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return 0
