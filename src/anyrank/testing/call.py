"""One call of a job on ranks: collect results and deaths until all ranks end, or a deadline."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from anyrank.testing import report
from anyrank.testing.fault import Fault
from anyrank.testing.report import Died, FaultNotReached
from anyrank.testing.server import ForkServer
from anyrank.testing.transport import END, GO, MET, READY, Raised, Reached, Returned, Task

MEET_SECONDS = 180.0  # the first call on a rank imports the modules of the job
STACK_SECONDS = 20.0  # for a rank on a busy machine; a rank that waits writes it at once
CLEAN_SECONDS = 120.0  # a rank that has run Lightning collects garbage for seconds
KILL_SECONDS = 20.0
CLOSED_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)


@dataclass
class Rank:
    """One rank process. `open` is False after its end of the pipe was found closed."""

    pid: int
    conn: Connection[Any, Any]
    stack_file: Path
    open: bool = True


class Call:
    """One job on ranks, and the outcome on each.

    Attributes:
        answers: rank -> its answer, or an error of this package in its place, in order of arrival.
        reached: the faults that were injected.
        stacks: rank -> its stack traces, for ranks that were stopped or crashed.
        met: the ranks that are set up and connected to all others.
        finished: the ranks that are ready for the next call, or dead.
    """

    def __init__(self, server: ForkServer, ranks: Sequence[Rank]) -> None:
        self.server = server
        self.ranks = ranks
        self.answers: dict[int, Returned | Raised | Died | OSError] = {}
        self.reached: list[Fault] = []
        self.stacks: dict[int, str] = {}
        self.met: set[int] = set()
        self.finished: set[int] = set()

    def run(self, tasks: Sequence[Task], timeout: float, grace: float) -> None:
        """Set up the ranks, run the job, and let every rank clean up, each within a deadline.

        The job starts after all ranks have met, and has `timeout` seconds. After the first
        unexpected failure of a rank, the others have `grace` seconds. Ranks that have not answered
        by then are killed after their stack traces are recorded.
        """
        for rank, task in zip(self.ranks, tasks, strict=True):
            send(rank, task)
        self.follow(self.unmet, "not set up", MEET_SECONDS, grace)
        # If a job failed while other ranks connect, they would have a partial group.
        if self.first_failure() is None:
            for rank in self.ranks:
                send(rank, GO)
            self.follow(self.unanswered, "not finished", timeout, grace)
        self.kill([i for i, answer in self.answers.items() if isinstance(answer, Died)])
        for rank in self.ranks:
            send(rank, END)
        self.follow(self.living, "not cleaned up", CLEAN_SECONDS, CLEAN_SECONDS)

    def follow(
        self, awaited: Callable[[], list[int]], what: str, seconds: float, grace: float
    ) -> None:
        """Wait until no rank is awaited; at the deadline, stop those that still are."""
        deadline, why = time.monotonic() + seconds, f"within {seconds:g} s"
        first: int | None = None
        while (stuck := awaited()) and time.monotonic() < deadline:
            self.wait(stuck, deadline)
            if first is None and (first := self.first_failure()) is not None:
                end = time.monotonic() + grace
                why_end = f"within {grace:g} s after rank {first} failed"
                deadline, why = min((deadline, why), (end, why_end))
        self.stop(stuck, f"{what} {why}; killed")

    def unmet(self) -> list[int]:
        """Return the ranks that are not set up yet."""
        return [index for index in self.unanswered() if index not in self.met]

    def unanswered(self) -> list[int]:
        """Return the ranks that have not answered yet."""
        return [index for index in range(len(self.ranks)) if index not in self.answers]

    def living(self) -> list[int]:
        """Return the ranks that are neither dead nor ready for the next call."""
        return [index for index in range(len(self.ranks)) if index not in self.finished]

    def first_failure(self) -> int | None:
        """Return the first rank that raised or died unexpectedly; None if no rank did."""
        failed = (i for i, answer in self.answers.items() if isinstance(answer, Raised | OSError))
        return next(failed, None)

    def wait(self, awaited: Sequence[int], deadline: float) -> None:
        """Wait for messages or deaths of ranks until the deadline, and record them."""
        pipes = [self.ranks[index].conn for index in awaited if self.ranks[index].open]
        wait([self.server.control, *pipes], max(0.0, deadline - time.monotonic()))
        # Read deaths first: once a death is known, all messages of the rank are in the pipe.
        self.server.watch()
        for index in awaited:
            self.drain(index)
            if self.ranks[index].pid in self.server.died:
                self.record_death(index)

    def drain(self, index: int) -> None:
        """Record everything that a rank has sent."""
        rank = self.ranks[index]
        while rank.open and rank.conn.poll():
            try:
                message = rank.conn.recv()
            except CLOSED_ERRORS:
                rank.open = False  # the rank is about to exit; its exit code has the reason
                return
            if isinstance(message, Reached):
                self.reached.append(message.fault)
                if message.fault.how == "stop":
                    self.answers[index] = Died("SIGSTOP", message.fault.point)
            elif message == MET:
                self.met.add(index)
            elif message == READY:
                self.finished.add(index)
            else:
                self.answers[index] = message

    def record_death(self, index: int) -> None:
        """Record a death, unless the rank failed already, or exited normally after its answer."""
        self.finished.add(index)
        answer = self.answers.get(index)
        code = self.server.died[self.ranks[index].pid]
        if isinstance(answer, Raised | Died | OSError) or (answer is not None and code == 0):
            return
        fatal = [fault for fault in self.reached if fault.how == "kill" and fault.rank == index]
        if fatal:
            self.answers[index] = Died("SIGKILL", fatal[0].point)
        else:
            self.answers[index] = ChildProcessError(report.name_exit(code))
            if stack := self.read_stack(index):
                self.stacks[index] = stack

    def stop(self, stuck: Sequence[int], why: str) -> None:
        """Record the stack traces of ranks, and kill the ranks."""
        for index in stuck:
            self.server.signal(self.ranks[index].pid, signal.SIGUSR2)
            self.server.signal(self.ranks[index].pid, signal.SIGCONT)
        deadline = time.monotonic() + STACK_SECONDS
        unread = set(stuck)
        while unread and time.monotonic() < deadline:
            time.sleep(0.05)
            # A dump is written in several parts, and the rank may wait between them.
            unread = {index for index in unread if not report.is_whole(self.read_dump(index))}
        self.kill(stuck)
        for index in stuck:
            self.stacks[index] = self.read_stack(index)
            if not isinstance(
                self.answers.get(index), Raised
            ):  # keep the cause, not its consequence
                silent = "" if self.stacks[index] else f"; no stack trace after {STACK_SECONDS:g} s"
                self.answers[index] = TimeoutError(why + silent)

    def kill(self, doomed: Sequence[int]) -> None:
        """Kill ranks, and wait until they are dead."""
        pids = {self.ranks[index].pid for index in doomed}
        for pid in pids:
            self.server.signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        while not pids <= self.server.died.keys() and time.monotonic() < deadline:
            self.server.watch(0.1)
        self.finished.update(doomed)

    def read_dump(self, index: int) -> str:
        """Return the text that the rank's fault handler has written so far; "" for none."""
        try:
            return self.ranks[index].stack_file.read_text()
        except FileNotFoundError:
            return ""

    def read_stack(self, index: int) -> str:
        """Return the stack traces of a rank, without the frames of this package."""
        return report.trim_stack(self.read_dump(index))

    def conclude(self, name: str, faults: Sequence[Fault]) -> list[Any]:
        """Return the results by rank; Died for a rank that a fault ended.

        Raises:
            RanksFailed: a rank failed.
            FaultNotReached: the point of a fault was never passed.
        """
        results: list[Any] = [None] * len(self.ranks)
        errors: dict[int, BaseException] = {}
        texts: dict[int, str] = {}
        for index, answer in self.answers.items():
            if isinstance(answer, Died):
                results[index] = answer
            elif isinstance(answer, OSError):
                errors[index] = answer
            elif isinstance(answer, Raised):
                errors[index] = original(answer)
                texts[index] = answer.text
            else:
                try:
                    results[index] = pickle.loads(answer.value)  # noqa: S301 - from our own rank
                except Exception as error:
                    errors[index] = error
                    texts[index] = (
                        f"its result cannot be unpickled: {type(error).__name__}: {error}"
                    )
        if errors:
            raise report.failure(name, len(self.ranks), errors, texts, self.stacks)
        missed = [fault for fault in faults if fault not in self.reached]
        if missed:
            raise FaultNotReached(f"never passed in {name}: {missed}", results)
        return results


def send(rank: Rank, message: Task | str) -> None:
    """Send a message to a rank; ignore a dead one, because its death is reported anyway."""
    with contextlib.suppress(*CLOSED_ERRORS):
        rank.conn.send(message)


def original(raised: Raised) -> BaseException:
    """Return the exception of a rank, or a RuntimeError with its text if unpickling fails."""
    if raised.error is not None:
        with contextlib.suppress(Exception):
            return pickle.loads(raised.error)  # noqa: S301 - from our own rank
    return RuntimeError(raised.text.strip().splitlines()[-1])
