"""gloo's connections between some ranks, which are kept from call to call.

Of these connections `torch.distributed` knows nothing, so that they do not mix with the user's
groups. Ranks that fail on them close them: who waits there, or comes later, raises the same error.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.background import Helper
from anyrank.world.waits import Notes, Wait

GLOO_SEC = 60  # that gloo waits for longer than we do, so that it is us who name the missing
DIRECT_BYTES = 4096  # up to which each rank sends to each: an all-gather passes on around a ring
MESSAGE_TAG, PROBE_TAG, CLOSE_TAG = 0, 1, 2  # of messages; what is sent with the others is nothing


class Connections:
    """The connections of one set of ranks.

    Args:
        notes: what the ranks note for each other.
        group: gloo's, which counts ranks by their position.

    Attributes:
        rounds: of agreement, so far.
    """

    def __init__(self, notes: Notes, group: Any) -> None:
        self.notes = notes
        self.index, self.size = notes.ranks.index(notes.rank), len(notes.ranks)
        self.calls = self.rounds = self.waits = 0
        self.passed = ""  # what messages are about
        self.helper: Helper | None = None  # waits for them
        self._group = group
        # At exit too: a group with works under way would wait for them.
        self._close = weakref.finalize(self, _close, group, self.index, self.size)

    def open_call(self) -> int:
        """A new call begins on the connections; its number, the same on all ranks. All ranks."""
        self.group.set_timeout(timedelta(seconds=TIMEOUT_SEC.get() + GLOO_SEC))
        self.calls += 1
        return self.calls

    @property
    def group(self) -> Any:
        """gloo's group.

        Raises:
            RankError: the ranks have failed on it.
        """
        if self._group is None:
            raise self.notes.as_error()
        return self._group

    @property
    def has_failed(self) -> bool:
        return self._group is None

    def fail(self, error: RankError) -> RankError:
        """Close the connections, as the ranks cannot go on together; returns the error."""
        if self._group is not None:
            self._close()
            last, self._group = [self._group], None
            # A group waits for the rest of a message even if its sender is dead.
            Helper().leave(last.clear)
        return error

    def allgather(self, data: bytes, length: int, what: str) -> Callable[[], list[bytes]]:
        """Start to send up to `length` bytes to all ranks; what waits for theirs. All ranks."""
        every, mine = as_tensor(b"", length * self.size), as_tensor(data, length)
        if length <= DIRECT_BYTES:
            work = self.group.alltoall_base(every, mine.repeat(self.size), [], [])
        else:
            work = self.group.allgather([*every.split(length)], mine)
        wait = self._collective(work, what)

        def received() -> list[bytes]:
            wait()
            return [_as_bytes(tensor) for tensor in every.split(length)]

        return received

    def broadcast(self, data: bytes, length: int, index: int, what: str) -> bytes:
        """The bytes of one rank on every rank. All ranks.

        Args:
            data: of that rank.
            length: of its bytes.
            index: of the rank.
            what: for messages.
        """
        payload = as_tensor(data, length)
        options = dist.BroadcastOptions()
        options.rootRank = index
        self._collective(self.group.broadcast([payload], options), what)()
        return data if index == self.index else _as_bytes(payload)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to send a contiguous CPU tensor; what waits for its end. Within `passing`."""
        return self._message(lambda to: self.group.send([tensor], to, MESSAGE_TAG), rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to fill a contiguous CPU tensor; what waits for its end. Within `passing`."""
        return self._message(lambda at: self.group.recv([tensor], at, MESSAGE_TAG), rank)

    @contextlib.contextmanager
    def passing(self, what: str) -> Generator[None, None, None]:
        """Around messages, until all of them are waited for."""
        self.passed = what
        try:
            yield
        finally:
            if self.helper is not None:
                self.helper.close()
                self.helper = None

    def closed(self) -> list[int]:
        """Ranks whose connections with this one are closed."""
        found: list[int] = []
        for rank in self.notes.ranks:
            try:
                if rank != self.notes.rank:
                    # Raises at once if it is closed; nothing is ever sent to the others.
                    self.group.recv([as_tensor(b"", 1)], self.notes.ranks.index(rank), PROBE_TAG)
            except RuntimeError:
                found.append(rank)
        return found

    def _collective(self, work: Any, what: str) -> Callable[[], None]:
        self.waits += 1
        number = self.waits

        def wait() -> None:
            # gloo's collectives can be waited for in slices, and its messages cannot.
            with self._failing(Wait(self.notes, what, self.closed, number)) as waiting:
                while not _ends_within(work, waiting.look_sec):
                    waiting.look()
                work.wait()

        return wait

    def _message(self, start: Callable[[int], Any], rank: int) -> Callable[[], None]:
        def waiting() -> contextlib.AbstractContextManager[Wait]:
            return self._failing(Wait(self.notes, self.passed, self.closed, None, [rank]))

        with waiting():
            work = start(self.notes.ranks.index(rank))

        def wait() -> None:
            with waiting() as looking:
                if self.helper is None:
                    self.helper = Helper()
                self.helper.call(work.wait, looking.look, looking.look_sec)

        return wait

    @contextlib.contextmanager
    def _failing(self, wait: Wait) -> Generator[Wait, None, None]:
        """Around a wait: what ends it before it is over ends the connections."""
        try:
            yield wait
        except RankError as error:
            self.fail(error)
            raise
        except RuntimeError as error:  # gloo's own, which differs from rank to rank
            raise self.fail(self.notes.end_by_death(self.closed())) from error
        finally:
            wait.over()


def _ends_within(work: Any, seconds: float) -> bool:
    """Whether one of gloo's collectives is over, well or not."""
    with contextlib.suppress(RuntimeError):  # it goes on, or it failed: a wait raises that again
        work.wait(timedelta(seconds=seconds))
    return work.is_completed()


def _close(group: Any, index: int, size: int) -> None:
    """Close all connections of a group: gloo does when a wait for a message runs out."""
    for other in set(range(size)) - {index}:
        with contextlib.suppress(RuntimeError):
            work = group.recv([as_tensor(b"", 1)], other, CLOSE_TAG)
            work.wait(timedelta(milliseconds=1))


def as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Bytes as a tensor of at least their length, padded with zeros."""
    tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, min(len(data), length))
    return tensor


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
