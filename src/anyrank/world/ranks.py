"""The processes of a call: the same code without a process group, on one rank and on many.

All traffic runs on connections of our own, of which `torch.distributed` knows nothing: it neither
mixes with the user's groups nor needs an accelerator. A flag in the store lets a rank learn of
another's failure while it is busy reading. A function whose docstring says "All ranks" meets the
others here: each rank has to call it, in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import socket
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.connections import Connections, connect_ranks
from anyrank.world.failures import Answer, Interrupted, different, failure_of, joined
from anyrank.world.group import Group, members, named
from anyrank.world.local_sockets import MAX_BYTES, LocalSockets, connect_locally, open_door
from anyrank.world.processes import own_process
from anyrank.world.store import StoreLost
from anyrank.world.waits import Pending, Waits, abandon
from anyrank.world.watch import Watch

__all__ = ["Interrupted", "Ranks", "one_process", "open_ranks"]

S = TypeVar("S")
T = TypeVar("T")

HEAD_BYTES = 512  # by gloo, where all ranks send as many
CHECK_SEC = 0.5  # how often a busy rank looks whether another has failed


class Ranks:
    """The ranks that take part in a call. Every method with "all ranks" must be called by each.

    Attributes:
        ranks: their global ranks, in the group's order.
        rank: this process's global rank.
        nodes: for each of `ranks`, which machine it is on; machines count from 0.
        hosts: for each machine, its name.
        store_node: the machine that hosts the ranks' store, where that is known.

    Raises:
        RankError: a rank died while the ranks met.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, connections: Connections | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.connections = connections
        self.last_check = time.monotonic()
        self.round = 0  # of agreement; a failure in one does not stop the next
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.store_node: int | None = None
        self.local: LocalSockets | None = None  # on one machine: for messages that are short
        if connections is None:
            return
        met = connections.met
        self.nodes, self.hosts, self.store_node = met.nodes, met.hosts, met.store_node
        self.watch = Watch(connections.store, rank, self.ranks, self.named, connections.group)
        self.waits = Waits(lambda: self.watch.in_vain)
        door = open_door(self.size) if len(self.hosts) == 1 else None
        mine = own_process(), None if door is None else door.address
        # The first gather also waits until all are connected: a rank that closed the group before
        # would break a slower one's connecting.
        every = self.gather(mine, "connecting the ranks")
        near = (index for index, node in enumerate(self.nodes) if node == self.node)
        self.watch.processes = {self.ranks[index]: every[index][0] for index in near}
        if len(self.hosts) == 1:
            addresses = [address for _, address in every]
            seconds, in_vain = TIMEOUT_SEC.get(), self.waits.in_vain
            self.local = connect_locally(door, self.index, addresses, seconds, in_vain)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Position of this rank in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def node(self) -> int:
        """Which machine this rank is on."""
        return self.nodes[self.index]

    @property
    def ranks_on_node(self) -> int:
        """How many of the ranks share this machine."""
        return self.nodes.count(self.node)

    @property
    def head_bytes(self) -> int:
        """Of a gathered value, what is sent at first: most fit, and then one exchange is enough."""
        return HEAD_BYTES if self.local is None else MAX_BYTES

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the ranks in words; with their machines, where there are several."""
        return named(ranks) if self.connections is None else self.connections.named(ranks)

    def gather(self, value: T, what: str = "exchanging values") -> list[T]:
        """Every rank's value, in the group's order. All ranks.

        Args:
            value: anything that pickles.
            what: what is done here, the same on all ranks.

        Raises:
            RankError: a rank has died or did not come, named where that is known; or ranks do
                something else here.
        """
        return self.start_gather(value, what)()

    def start_gather(self, value: T, what: str) -> Callable[[], list[T]]:
        """As `gather`, in two halves: sends the value, and returns what waits for the others'."""
        if self.connections is None:
            return lambda: [value]
        data = pickle.dumps((what, value))
        sized = len(data).to_bytes(8, "little") + data
        most = self.head_bytes
        with self._waiting(what):
            if self.local is None:
                wait_for_heads = self._start_bytes(sized[:most], most)
            else:
                wait_for_heads = self.local.start(sized[:most])

        def wait() -> list[T]:
            with self._waiting(what):
                parts = wait_for_heads()
                longest = max(int.from_bytes(head[:8], "little") for head in parts) + 8
                if longest > most:
                    tails = self._start_bytes(sized[most:], longest - most)()
                    parts = [head + tail for head, tail in zip(parts, tails, strict=True)]
            answers = [pickle.loads(part[8:]) for part in parts]  # noqa: S301 - from our own ranks
            if any(theirs != what for theirs, _ in answers):
                done = {rank: theirs for rank, (theirs, _) in zip(self.ranks, answers, strict=True)}
                text = different("ranks do different things at the same place", done, self.named)
                raise RankError(f"{text}: make the same calls on all ranks, in the same order")
            return [value for _, value in answers]

        return wait

    def _start_bytes(self, data: bytes, length: int) -> Callable[[], list[bytes]]:
        every, mine = [_as_tensor(b"", length) for _ in self.ranks], _as_tensor(data, length)
        work = self.waits.add(self.group.allgather(every, mine), (every, mine))

        def wait() -> list[bytes]:
            work.wait()
            return [_as_bytes(received) for received in every]

        return wait

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank. All ranks.

        Raises:
            RankError: as `gather`.
        """
        return self.start_any(flag, what)()

    def start_any(self, flag: bool, what: str) -> Callable[[], bool]:
        """As `any`, in two halves: starts the exchange, and returns what waits for its result."""
        if self.connections is None:
            return lambda: flag
        if self.local is not None:
            gathered = self.start_gather(flag, what)
            return lambda: any(gathered())
        total = torch.tensor([int(flag)], device="cpu")
        with self._waiting(what):
            work = self.waits.add(self.group.allreduce([total]), total)

        def wait() -> bool:
            with self._waiting(what):
                work.wait()
            return bool(total.item())

        return wait

    def exchange(
        self,
        sent: Iterable[tuple[torch.Tensor, int]],
        received: Iterable[tuple[torch.Tensor, int]],
        what: str,
    ) -> None:
        """Send tensors to ranks, and receive others in place.

        Two ranks that exchange with each other list what passes between them in the same order.

        Args:
            sent: contiguous CPU tensors, and the global rank that each goes to.
            received: contiguous CPU tensors that are filled, and where each comes from.
            what: for messages.

        Raises:
            RankError: as `gather`.
        """
        with self._waiting(what):
            works = [self.start_send(t, rank) for t, rank in sent]
            works += [self.start_receive(t, rank) for t, rank in received]
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def streaming(self, what: str) -> Generator[None, None, None]:
        """Around sends and receives side by side, until all are waited for; raises as `gather`."""
        with contextlib.nullcontext() if self.connections is None else self._waiting(what):
            yield

    def start_send(self, tensor: torch.Tensor, rank: int) -> Pending:
        """Start to send a contiguous CPU tensor; what waits for its end. Within `streaming`."""
        return self.waits.add(self.group.send([tensor], self.ranks.index(rank), 0), tensor)

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Pending:
        """Start to fill a contiguous CPU tensor; what waits for its end. Within `streaming`."""
        return self.waits.add(self.group.recv([tensor], self.ranks.index(rank), 0), tensor)

    @property
    def group(self) -> Any:
        """gloo's connections."""
        assert self.connections is not None
        return self.connections.group

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Generator[None, None, None]:
        self.watch.begin(what)
        try:
            yield
        except RuntimeError as error:
            abandon(self.group)
            crossed = self.watch.why()
            raise (RankError(crossed) if crossed else self.roll_call(what)) from error
        finally:
            self.watch.end()

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; when one fails, all raise. All ranks.

        `work` must not wait for other ranks, unless it keeps serving them after its own failure.

        Raises:
            AnyrankError: of the class that the first failing rank raised, with every cause;
                RankError for an exception that is not anyrank's own, and for a rank that died.
        """
        return self.own_and_all(what, lambda: (None, work()))[1]

    def own(self, what: str, work: Callable[[], T]) -> T:
        """As `together`; each rank keeps its result, the very object, and sends nothing."""
        return self.own_and_all(what, lambda: (work(), None))[0]

    def own_and_all(self, what: str, work: Callable[[], tuple[S, T]]) -> tuple[S, list[T]]:
        """As `together`; each rank keeps a result of its own, and sends another. All ranks.

        Args:
            what: as for `together`.
            work: returns (anything at all, what the other ranks get, which pickles).

        Returns:
            This rank's own first result, the very object, and every rank's second.

        Raises:
            AnyrankError: as `together`.
        """
        own, value, cause = None, None, None
        self.round += 1
        try:
            own, value = work()
        except Exception as error:
            if self.connections is None:
                raise
            cause = error
            self._raise_flag()
        failure = None if cause is None else failure_of(cause)
        answers = self.gather(Answer(value, failure), what)
        failures = {r: a.failure for r, a in zip(self.ranks, answers, strict=True) if a.failure}
        if failures:
            raise joined(what, failures, self.size) from cause
        return cast("S", own), [answer.value for answer in answers]

    def from_one(self, what: str, work: Callable[[], T], rank: int | None = None) -> T:
        """Run `work` on one rank, the first by default; its result on every rank. All ranks.

        Raises:
            AnyrankError: as `together`.
        """
        rank = self.ranks[0] if rank is None else rank

        def here() -> tuple[tuple[T | None, bytes], tuple[int, bytes]]:
            value = work() if self.rank == rank else None
            sent = self.connections is not None and self.rank == rank
            data = pickle.dumps(value) if sent else b""
            small = data if len(data) <= self.head_bytes // 2 else b""  # travels with its length
            return (value, data), (len(data), small)

        (value, data), every = self.own_and_all(what, here)
        if self.connections is None:
            return cast("T", value)
        length, small = max(every)
        if small:
            return pickle.loads(small)  # noqa: S301 - from our own rank
        payload = _as_tensor(data, length)
        with self._waiting(what):
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(rank)
            self.waits.add(self.group.broadcast([payload], options), payload).wait()
        if self.rank == rank:
            return cast("T", value)
        result: T = pickle.loads(_as_bytes(payload))  # noqa: S301 - from our own rank
        return result

    def check(self) -> None:
        """Stop early when another rank has failed; cheap enough for inner loops.

        Raises:
            Interrupted: to be passed through to `together`.
        """
        if self.connections is None or time.monotonic() - self.last_check < CHECK_SEC:
            return
        self.last_check = time.monotonic()
        if self.connections.store.has([self._flag]):
            raise Interrupted

    def roll_call(self, what: str) -> RankError:
        """The error that names the ranks that no longer answer, for those that do."""
        assert self.connections is not None
        return self.connections.roll_call(self.rank, self._flag, self.watch.number, what)

    def leave(self) -> None:
        """This rank comes to no further exchange: who waits for it in one, or comes to wait, raises
        within seconds. Any rank.
        """
        if self.connections is not None:
            with contextlib.suppress(StoreLost):
                self.connections.store.set("roll call")

    @property
    def _flag(self) -> str:
        return f"failed/{self.round}"

    def _raise_flag(self) -> None:
        assert self.connections is not None
        with contextlib.suppress(StoreLost):  # the gather that follows reports what is wrong
            self.connections.store.set(self._flag)


def one_process() -> Ranks:
    """This process alone, whatever groups there are."""
    return Ranks((0,), 0)


@contextlib.contextmanager
def open_ranks(
    process_group: Group = None, call: str = "this call", about: str = ""
) -> Generator[Ranks, None, None]:
    """The ranks of a group, of the default group, or of this process alone. All ranks of the group.

    Args:
        process_group: see `Group`.
        call: what the ranks call, the same on each: "load()".
        about: see `Meeting`.

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC, or some called something else.
    """
    ranks, rank = members(process_group)
    if len(ranks) == 1:
        yield Ranks(ranks, rank)
        return
    made = Ranks(ranks, rank, connect_ranks(ranks, rank, call, about))
    try:
        yield made
    finally:
        if made.local is not None:
            made.local.close()
        made.waits.close()
        made.watch.close()
        made.connections = None


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Bytes as a tensor of at least their length, padded with zeros."""
    tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, min(len(data), length))
    return tensor


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
