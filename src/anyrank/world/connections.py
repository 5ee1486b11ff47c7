"""gloo's connections between some ranks, kept from call to call.

`torch.distributed` does not know these connections, so they do not mix with the user's groups. A
rank that fails closes its connections: all that wait on them, or come later, raise the same error.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.helper_thread import HelperThread
from anyrank.world.waits import GroupState, Wait

GLOO_SEC = 60  # gloo's timeout is longer than ours by this, so that our error names the missing
DEATH_SEC = 1.0  # until the system has told all of a process's connections of its end
DIRECT_BYTES = 4096  # up to this size an all-to-all, with fewer hops than gloo's ring all-gather
PROBE_TAG, CLOSE_TAG = 1, 2  # nothing is ever sent with these; messages have the tag 0


class Connections:
    """The connections of one set of ranks.

    Args:
        state: the state that the ranks share.
        group: gloo's group; its ranks are positions in `state.ranks`.
    """

    def __init__(self, state: GroupState, group: Any) -> None:
        self.state = state
        self.index, self.size = state.ranks.index(state.rank), len(state.ranks)
        self.calls = self.waits = 0
        self.device_groups: dict[str, Any] = {}  # see sync/device_group.py
        self._group = group
        # Also at exit, where a group would wait for its works under way.
        self._close = weakref.finalize(self, _close, group, self.index, self.size)

    def start_call(self) -> int:
        """Start a call on the connections; returns its number, equal on all ranks. All ranks."""
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
            raise self.state.as_error()
        return self._group

    @property
    def has_failed(self) -> bool:
        return self._group is None

    def fail(self, error: RankError) -> RankError:
        """Close the connections; returns the error."""
        for group in self.device_groups.values():
            group.abort()
        if self._group is not None:
            self._close()
            to_free, self._group = [self._group, *self.device_groups.values()], None
            self.device_groups.clear()
            # Freeing a group waits for messages under way, also for those of dead ranks.
            HelperThread().leave(to_free.clear)
        return error

    def allgather(self, data: bytes, length: int, what: str) -> Callable[[], list[bytes]]:
        """Start to send up to `length` bytes; returns a function that waits for all. All ranks."""
        padded = data.ljust(length, b"\0")
        gathered = as_tensor(bytes(length * self.size))
        if length <= DIRECT_BYTES:
            copies = as_tensor(padded * self.size)
            work = self.group.alltoall_base(gathered, copies, [], [])
        else:
            work = self.group.allgather([*gathered.split(length)], as_tensor(padded))
        wait = self.collective(work, what)

        def received() -> list[bytes]:
            wait()
            whole = _as_bytes(gathered)
            return [whole[start : start + length] for start in range(0, len(whole), length)]

        return received

    def broadcast(self, data: bytes, length: int, index: int, what: str) -> bytes:
        """Send the bytes of one rank to every rank, and return them. All ranks.

        Args:
            data: the bytes, on that rank.
            length: their number, on all ranks.
            index: the rank's position.
            what: for messages.
        """
        payload = as_tensor(data if index == self.index else bytes(length))
        options = dist.BroadcastOptions()
        options.rootRank = index
        self.collective(self.group.broadcast([payload], options), what)()
        return data if index == self.index else _as_bytes(payload)

    def find_closed(self) -> list[int]:
        """Ranks whose connections to this one are closed."""
        closed: list[int] = []
        for rank in self.state.ranks:
            try:
                if rank != self.state.rank:
                    # Raises at once if the connection is closed; else waits for nothing.
                    self.group.recv([as_tensor(bytes(1))], self.state.ranks.index(rank), PROBE_TAG)
            except RuntimeError:
                closed.append(rank)
        return closed

    def _find_dead(self) -> list[int]:
        """As `find_closed`, after an error of another group, which may hear of a death first."""
        end_sec = time.monotonic() + (DEATH_SEC if self.device_groups else 0)
        while not (closed := self.find_closed()) and time.monotonic() < end_sec:
            time.sleep(DEATH_SEC / 10)
        return closed

    def count_wait(self) -> int:
        """Count a wait in which all ranks take part; returns its number, equal on all ranks."""
        self.waits += 1
        return self.waits

    def collective(self, work: Any, what: str) -> Callable[[], None]:
        """The wait for a collective of gloo's that all ranks have started."""
        number = self.count_wait()

        def wait() -> None:
            # A wait for gloo's collectives can be cut into slices, one for its messages cannot.
            with self.waiting(what, number) as waiting:
                while not _ends_within(work, waiting.poll_sec):
                    waiting.poll()

        return wait

    @contextlib.contextmanager
    def waiting(
        self, what: str, number: int | None, peers: Sequence[int] = ()
    ) -> Generator[Wait, None, None]:
        """Wait within for other ranks. Closes the connections if that fails, and makes gloo's error
        a RankError.

        Args:
            what: for messages.
            number: of `count_wait`; None for a wait for `peers`.
            peers: global ranks.
        """
        wait = Wait(self.state, what, self.find_closed, number, peers)
        try:
            yield wait
        except RankError as error:
            self.fail(error)
            raise
        except RuntimeError as error:  # of gloo; its text differs between ranks
            raise self.fail(self.state.end_for_death(self._find_dead())) from error
        finally:
            wait.finish()


def _ends_within(work: Any, limit_sec: float) -> bool:
    """Wait for a collective of gloo; returns whether it ended.

    Raises:
        RuntimeError: it failed.
    """
    try:
        work.wait(timedelta(seconds=limit_sec))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed, and not where it ended just after the time was over
    return True


def _close(group: Any, index: int, size: int) -> None:
    """Close all connections of a group: gloo closes one when a wait for its message times out."""
    for peer in set(range(size)) - {index}:
        with contextlib.suppress(RuntimeError):
            work = group.recv([as_tensor(bytes(1))], peer, CLOSE_TAG)
            work.wait(timedelta(milliseconds=1))


def as_tensor(data: bytes) -> torch.Tensor:
    """A copy of some bytes as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
