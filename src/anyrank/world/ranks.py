"""The processes of a call: the same code without a process group, on one rank and on many.

All traffic runs on connections of our own, of which `torch.distributed` knows nothing: it neither
mixes with the user's groups nor needs an accelerator. A flag in the store lets a rank learn of
another's failure while it is busy reading. A function whose docstring says "All ranks" meets the
others here: each rank has to call it, in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from anyrank.world.connections import Connections
from anyrank.world.failures import Answer, Interrupted, different, failure_of, joined
from anyrank.world.group import Group, members, named
from anyrank.world.rendezvous import channels_of, connections_of, taken
from anyrank.world.store import StoreLost

__all__ = ["Interrupted", "Ranks", "one_process", "open_ranks"]

S = TypeVar("S")
T = TypeVar("T")

HEAD_BYTES = 1024  # what each rank sends at first: most values fit
PADDED_BYTES = 64 << 10  # up to which a gathered value is padded to the longest
NAME_CHARACTERS = 100  # of what is done, as the ranks compare it
CHECK_SEC = 0.5  # how often a busy rank looks whether another has failed


class Ranks:
    """The ranks that take part in a call. Every method with "all ranks" must be called by each.

    Args:
        ranks: their global ranks, in the group's order.
        rank: this process's global rank.
        call: what they call, for messages.
        channel: which of the connections between them they use.

    Attributes:
        nodes: for each of `ranks`, which machine it is on; machines count from 0.
        hosts: for each machine, its name.

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC.
    """

    connections: Connections | None = None

    def __init__(
        self, ranks: Sequence[int], rank: int, call: str | None = None, channel: int = 0
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.call, self.channel = call or "", channel
        self.last_check = time.monotonic()
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self._flag = ""  # the key that says that this agreement fails; "" outside of agreements
        if call is not None and len(ranks) > 1:
            self._connect()

    def _connect(self) -> Connections:
        made = connections_of(self.ranks, self.rank, self.call, self.channel)
        self.number = made.open_call()
        self.connections = made
        self.nodes, self.hosts = made.notes.nodes, made.notes.hosts
        return made

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

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the ranks in words; with their machines, where there are several."""
        return named(ranks) if self.connections is None else self.connections.notes.named(ranks)

    # -- agreement --------------------------------------------------------------------------------

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

    def from_one(self, what: str, work: Callable[[], T], rank: int | None = None) -> T:
        """Run `work` on one rank, the first by default; its result on every rank. All ranks.

        Raises:
            AnyrankError: as `together`.
        """
        index = 0 if rank is None else self.ranks.index(rank)
        is_mine = index == self.index

        def work_here() -> tuple[T | None, T | None]:
            value = work() if is_mine else None
            return value, value

        own, every = self.own_and_all(what, work_here)
        return cast("T", own if is_mine else every[index])

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
        if self.connections is None:
            own, value = work()
            return own, [value]
        connections = self._ready()
        connections.rounds += 1
        own, packed, cause = None, b"", None
        outer, self._flag = self._flag, f"failed/{connections.rounds}"
        try:
            try:
                own, value = work()
                packed = pickle.dumps(value)
            except Exception as error:
                if connections.has_failed:  # within the work, and so the others raise too
                    raise connections.notes.as_error() from error
                cause = error
                self._set_flag(connections)
            answers = self.gather(Answer(packed, cause and failure_of(cause)), what)
        finally:
            if cause is not None:
                self._delete_flag(connections)
            self._flag = outer
        failures = {r: a.failure for r, a in zip(self.ranks, answers, strict=True) if a.failure}
        if failures:
            raise joined(what, failures, self.size) from cause
        values = [pickle.loads(answer.value) for answer in answers]  # noqa: S301 - from our own ranks
        return cast("S", own), values

    def check(self) -> None:
        """Stop early when another rank has failed; cheap enough for inner loops.

        Raises:
            Interrupted: to be passed through to `together`.
        """
        if not self._flag or time.monotonic() - self.last_check < CHECK_SEC:
            return
        self.last_check = time.monotonic()
        assert self.connections is not None
        if self.connections.notes.store.has([self._flag]):
            raise Interrupted

    def _set_flag(self, connections: Connections) -> None:
        with contextlib.suppress(StoreLost):  # the gather that follows reports what is wrong
            connections.notes.store.set(self._flag, "")

    def _delete_flag(self, connections: Connections) -> None:
        with contextlib.suppress(StoreLost):
            connections.notes.store.delete(self._flag)

    # -- values -----------------------------------------------------------------------------------

    def gather(self, value: T, what: str = "exchanging values") -> list[T]:
        """Every rank's value, in the group's order. All ranks.

        Args:
            value: anything that pickles. Over 64 KiB of one rank alone goes faster by `from_one`.
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
        return self._gather(self._ready(), value, what)

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank. All ranks.

        Raises:
            RankError: as `gather`.
        """
        return self.start_any(flag, what)()

    def start_any(self, flag: bool, what: str) -> Callable[[], bool]:
        """As `any`, in two halves: starts the exchange, and returns what waits for its result."""
        gathered = self.start_gather(flag, what)
        return lambda: any(gathered())

    def _ready(self) -> Connections:
        """The connections; where the ranks have failed on them and live, new ones."""
        assert self.connections is not None
        if self.connections.has_failed and not self._flag and not self.connections.notes.is_death:
            return self._connect()
        return self.connections

    def _gather(self, connections: Connections, value: T, what: str) -> Callable[[], list[T]]:
        data = pickle.dumps(value)
        name = self.number, self.call[:NAME_CHARACTERS], what[:NAME_CHARACTERS]
        head = pickle.dumps((name, data[: HEAD_BYTES + 1]))
        if len(head) > HEAD_BYTES:
            head = pickle.dumps((name, len(data)))
        wait_for_heads = connections.allgather(head, HEAD_BYTES, what)

        def wait() -> list[T]:
            heads = [pickle.loads(each) for each in wait_for_heads()]  # noqa: S301 - as above
            names = {r: theirs for r, (theirs, _) in zip(self.ranks, heads, strict=True)}
            if len({*names.values()}) > 1:
                raise connections.fail(connections.notes.end(_crossed(names, self.named)))
            every: list[Any] = [inline for _, inline in heads]
            sizes = {index: each for index, each in enumerate(every) if isinstance(each, int)}
            most = max(2 * sum(sizes.values()), PADDED_BYTES * self.size)
            if len(sizes) > 1 and max(sizes.values()) * self.size <= most:
                mine = data if self.index in sizes else b""
                for index, tail in enumerate(
                    connections.allgather(mine, max(sizes.values()), what)()
                ):
                    if index in sizes:
                        every[index] = tail
            else:
                for index, size in sizes.items():
                    every[index] = connections.broadcast(data, size, index, what)
            return [pickle.loads(each) for each in every]  # noqa: S301 - as above

        return wait

    # -- tensors ----------------------------------------------------------------------------------

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
        with self.streaming(what):
            waits = [self.start_send(t, rank) for t, rank in sent]
            waits += [self.start_receive(t, rank) for t, rank in received]
            for wait in waits:
                wait()

    @contextlib.contextmanager
    def streaming(self, what: str) -> Generator[None, None, None]:
        """Around sends and receives side by side, until all are waited for."""
        if self.connections is None:
            yield
            return
        with self._ready().passing(what):
            yield

    def start_send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to send a contiguous CPU tensor; what waits for its end. Within `streaming`."""
        assert self.connections is not None
        return self.connections.send(tensor, rank)

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to fill a contiguous CPU tensor; what waits for its end. Within `streaming`."""
        assert self.connections is not None
        return self.connections.receive(tensor, rank)

    def end(self, why: str) -> None:
        """Say that this rank goes no further: the waits of the others end by an error that says
        why. The next call connects the ranks anew. By one rank, without a wait.
        """
        if self.connections is not None and not self.connections.has_failed:
            self.connections.fail(self.connections.notes.end(why, [self.rank], why))

    @contextlib.contextmanager
    def apart(self, call: str) -> Generator[Ranks, None, None]:
        """The same ranks, with connections for a thread of their own. All ranks."""
        every = self.gather(channels_of(self.ranks), f"opening a channel for {call}")
        channel = next(n for n in itertools.count(1) if not any(n in used for used in every))
        with taken(self.ranks, channel):
            yield Ranks(self.ranks, self.rank, call, channel)


def one_process() -> Ranks:
    """This process alone, whatever groups there are."""
    return Ranks((0,), 0)


@contextlib.contextmanager
def open_ranks(
    process_group: Group = None, call: str = "this call"
) -> Generator[Ranks, None, None]:
    """The ranks of a group, of the default group, or of this process alone. All ranks of the group.

    What connects them is opened at the first call, and kept.

    Args:
        process_group: see `Group`.
        call: what the ranks call, the same on each: "load()".

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC.
    """
    ranks, rank = members(process_group)
    yield Ranks(ranks, rank, call)


def _crossed(
    names: Mapping[int, tuple[int, str, str]], name: Callable[[Sequence[int]], str]
) -> str:
    """What ranks do that do not do the same, in words."""
    done = {rank: what for rank, (_, _, what) in names.items()}
    if len({*done.values()}) == 1:
        done = {rank: call for rank, (_, call, _) in names.items()}
    if len({*done.values()}) == 1:
        done = {rank: f"{call}, its call {number}" for rank, (number, call, _) in names.items()}
    text = different("ranks do different things at the same place", done, name)
    return f"{text}: make the same calls on all ranks, in the same order"
