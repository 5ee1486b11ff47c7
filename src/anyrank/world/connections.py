"""gloo's connections between some ranks, which are kept from one call to the next.

`torch.distributed` does not know these connections, so they do not interfere with the user's
groups. Two ranks connect when one first sends to the other: neighbors in the tree when the group is
opened, others for the bytes of a load or a sync. A rank that fails closes its connections; every
rank that waits on them, or uses them later, raises the same error.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from anyrank.errors import RankError
from anyrank.world.helper_thread import HelperThread
from anyrank.world.message import ENDED, Message
from anyrank.world.pairs import gloo_timeout
from anyrank.world.tree import find_neighbors
from anyrank.world.waits import GroupState, Wait

T = TypeVar("T")

TELL_SEC = 0.05  # for the last message to neighbors
DEATH_SEC = 1.0  # until all connections of a process have noticed its end
TENSOR_TAG, TREE_TAG = 0, 1  # tensors are kept apart from a simultaneous exchange through the tree
PROBE_TAG, CLOSE_TAG = 2, 3  # nothing is ever sent with these


class Connections:
    """The connections of one set of ranks.

    Args:
        state: state that the ranks share, including their machines.
        group: gloo's group, whose ranks are positions in `state.ranks`.
        connected: positions of the ranks that are connected already.
    """

    def __init__(self, state: GroupState, group: Any, connected: Collection[int] = ()) -> None:
        self.state = state
        self.index, self.size = state.ranks.index(state.rank), len(state.ranks)
        self.neighbors = find_neighbors(state.nodes, self.index)
        self.calls = self.waits = 0
        self.device_groups: dict[str, Any] = {}  # see live/device_group.py
        self._group = group
        self._connected, self._refused = {*connected}, set[int]()
        # Also at exit, where a group would wait for its pending work.
        self._close = weakref.finalize(self, _close, group, self._connected)
        # It receives messages of the tree, because a wait for one of gloo's messages cannot be
        # interrupted.
        self._messenger = HelperThread(partial(_close, group, self._connected))
        weakref.finalize(self, self._messenger.close)

    def start_call(self) -> int:
        """Start a call; return its number, which is the same on every rank. Collective."""
        self.group.set_timeout(gloo_timeout())
        self.calls += 1
        return self.calls

    @property
    def group(self) -> Any:
        """gloo's group.

        Raises:
            RankError: the ranks have failed on this group.
        """
        if self._group is None:
            raise self.state.as_error()
        return self._group

    @property
    def has_failed(self) -> bool:
        return self._group is None

    def fail(self, error: RankError) -> RankError:
        """Close the connections, and return the error."""
        for group in self.device_groups.values():
            group.abort()
        if self._group is not None:
            if self.state.error is not None:
                self._tell_neighbors()
            self._close()
            to_free, self._group = [self._group, *self.device_groups.values()], None
            self.device_groups.clear()
            # Freeing a group waits for pending messages, even for those of dead ranks.
            self._messenger.leave(to_free.clear)
        return error

    def _tell_neighbors(self) -> None:
        """Send the error to the neighbors in the tree. If the store is lost too, such as with the
        process that hosts it, they would otherwise take this rank for the one that died.
        """
        message = Message(b"", ENDED, pickle.dumps(self.state.error))
        parent = self.neighbors.parent
        neighbors = {*self.neighbors.children, *([] if parent is None else [parent])}
        works: list[Any] = []
        for index in neighbors & self._connected:
            with contextlib.suppress(RuntimeError):
                works += [self._start("send", as_tensor(p), index, TREE_TAG) for p in message.parts]
        time.sleep(TELL_SEC)  # time for the message to be sent, if a neighbor waits for it
        del works

    # -- messages ---------------------------------------------------------------------------------

    def send(self, data: bytes, index: int) -> Callable[[], None]:
        """Start to send bytes to the rank at a position; return a function that waits for it."""
        return self._start("send", as_tensor(data), index, TREE_TAG).wait

    def receive(self, length: int, index: int) -> Callable[[], bytes]:
        """Start to receive `length` bytes from a position; return a function that waits."""
        tensor = as_tensor(bytes(length))
        work = self._start("recv", tensor, index, TREE_TAG)

        def received() -> bytes:
            work.wait()
            return ctypes.string_at(tensor.data_ptr(), length)

        return received

    def pass_tensor(self, kind: str, tensor: torch.Tensor, rank: int, waiting: Wait) -> Any:
        """Start to send a tensor to a rank, or to receive it in place; return gloo's work.

        Args:
            kind: "send" or "recv".
            tensor: on the CPU, contiguous.
            rank: global.
            waiting: the caller's wait, polled while the two ranks connect.
        """
        index = self.state.ranks.index(rank)
        if index in self._connected:
            return self._start(kind, tensor, index, TENSOR_TAG)
        with HelperThread() as helper:
            start = partial(self._start, kind, tensor, index, TENSOR_TAG)
            return helper.call(start, waiting.poll, waiting.poll_sec)

    def _start(self, kind: str, tensor: torch.Tensor, index: int, tag: int) -> Any:
        """Start a message. Blocks until the other rank has connected too."""
        try:
            work = getattr(self.group, kind)([tensor], index, tag)
        except RuntimeError:
            self._refused.add(index)
            raise
        self._connected.add(index)
        return work

    def talk(self, exchange: Callable[[], T], what: str) -> Callable[[], T]:
        """Start an exchange through the tree in the messenger's thread; return its wait.
        Collective.

        Args:
            exchange: function that sends and receives, in the messenger's thread.
            what: what this rank waits for, for messages.
        """
        number = self.count_wait()
        _ = self.group  # raises if the ranks have failed
        wait_for = self._messenger.start(exchange)

        def wait() -> T:
            with self.waiting(what, number) as waiting:
                return wait_for(waiting.poll, waiting.poll_sec)

        return wait

    # -- failures ---------------------------------------------------------------------------------

    def find_closed(self) -> list[int]:
        """Find the ranks whose connections to this rank are closed or could not be opened."""
        closed = {*self._refused}
        for index in [*self._connected]:
            try:
                # Raises at once if the connection is closed; otherwise does not wait.
                self.group.recv([as_tensor(bytes(1))], index, PROBE_TAG)
            except RuntimeError:
                closed.add(index)
        return [self.state.ranks[index] for index in sorted(closed)]

    def _find_dead(self) -> list[int]:
        """Find dead ranks after an error of a different group, which may notice a death first."""
        end_sec = time.monotonic() + (DEATH_SEC if self.device_groups else 0)
        while not (closed := self.find_closed()) and time.monotonic() < end_sec:
            time.sleep(DEATH_SEC / 10)
        return closed

    # -- waits ------------------------------------------------------------------------------------

    def count_wait(self) -> int:
        """Count a wait in which all ranks take part; return its number, the same on every rank."""
        self.waits += 1
        return self.waits

    def collective(self, work: Any, what: str) -> Callable[[], None]:
        """Return a function that waits for a collective of gloo, which all ranks have started."""
        number = self.count_wait()

        def wait() -> None:
            with self.waiting(what, number) as waiting:
                while not _ends_within(work, waiting.poll_sec):
                    waiting.poll()

        return wait

    @contextlib.contextmanager
    def waiting(
        self, what: str, number: int | None, peers: Sequence[int] = ()
    ) -> Generator[Wait, None, None]:
        """Wait for other ranks inside the block.

        If the wait fails, close the connections and turn gloo's error into a RankError.

        Args:
            what: what this rank waits for, for messages.
            number: number from `count_wait`; None for a wait for `peers`.
            peers: global ranks.
        """
        wait = Wait(self.state, what, self.find_closed, number, peers)
        try:
            yield wait
        except RankError as error:
            self.fail(error)
            raise
        except RuntimeError as error:  # from gloo; its text differs between ranks
            raise self.fail(self.state.end_for_death(self._find_dead())) from error
        finally:
            wait.finish()


def _ends_within(work: Any, limit_sec: float) -> bool:
    """Wait for one of gloo's collectives; return whether it has ended.

    Raises:
        RuntimeError: it failed.
    """
    try:
        work.wait(timedelta(seconds=limit_sec))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed, but not if it ended just after the deadline
    return True


def _close(group: Any, connected: set[int]) -> None:
    """Close all connections of a group, which gloo does when a wait for a message times out."""
    for peer in [*connected]:
        with contextlib.suppress(RuntimeError):
            work = group.recv([as_tensor(bytes(1))], peer, CLOSE_TAG)
            work.wait(timedelta(milliseconds=1))


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes into a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
