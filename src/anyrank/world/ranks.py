"""The processes of a call: the same code without a process group, on one rank and on many.

All messages go over connections that `torch.distributed` does not know: they neither mix with the
user's groups nor need an accelerator. A function whose docstring says "All ranks" exchanges values
here: each rank calls it, in the same order.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

from anyrank.errors import RankError
from anyrank.world.connections import Connections
from anyrank.world.failures import (
    NO_ANSWER,
    Failure,
    Interrupted,
    as_failure,
    describe_values,
    join_failures,
)
from anyrank.world.group import (
    Group,
    check_has_group,
    find_members,
    lacks_group,
    name_ranks,
    warn_of_no_group,
)
from anyrank.world.rendezvous import get_connections

__all__ = ["Interrupted", "Ranks", "one_process", "open_ranks"]

S = TypeVar("S")
T = TypeVar("T")

HEAD_BYTES = 1024  # of the first message of a gather: most values fit into it
PADDED_BYTES = 64 << 10  # up to this size gathered values are padded to the longest
NAME_CHARACTERS = 100  # of `call` and `what`, as the ranks compare them


class Ranks:
    """The ranks that take part in a call. All of them call the methods that say "All ranks".

    Args:
        ranks: their global ranks, in the group's order.
        rank: this process's global rank.
        call: what they call, for messages.
        channel: 0, or the number of a thread's own connections.

    Attributes:
        nodes: for each of `ranks`, the index of its machine.
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
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self._depth = 0  # agreements that are under way, one in the work of another
        if call is not None and len(ranks) > 1:
            self._connect()

    def _connect(self) -> Connections:
        connections = get_connections(self.ranks, self.rank, self.call, self.channel)
        self.number = connections.start_call()
        self.connections = connections
        self.nodes, self.hosts = connections.state.nodes, connections.state.hosts
        return connections

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Position of this rank in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def node(self) -> int:
        """The index of this rank's machine."""
        return self.nodes[self.index]

    @property
    def ranks_on_node(self) -> int:
        """How many of the ranks share this machine."""
        return self.nodes.count(self.node)

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Ranks as text; with their machines if there are several."""
        connections = self.connections
        return connections.state.name_ranks(ranks) if connections else name_ranks(ranks)

    # -- agreement --------------------------------------------------------------------------------

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; when one fails, all raise. All ranks.

        `work` must not wait for other ranks, unless it still answers them after its own failure.

        Raises:
            AnyrankError: of the class that the first failing rank raised, with every cause;
                RankError for an exception that is not anyrank's own, and for a rank that died.
        """
        return self.run_and_gather(what, lambda: (None, work()))[1]

    def run(self, what: str, work: Callable[[], T]) -> T:
        """As `together`; each rank keeps its result, the very object, and sends nothing."""
        return self.run_and_gather(what, lambda: (work(), None))[0]

    def run_on_one(self, what: str, work: Callable[[], T], rank: int | None = None) -> T:
        """Run `work` on one rank, by default the first; returns its result everywhere. All ranks.

        Raises:
            AnyrankError: as `together`.
        """
        index = 0 if rank is None else self.ranks.index(rank)
        is_chosen = index == self.index

        def run_if_chosen() -> tuple[T | None, T | None]:
            value = work() if is_chosen else None
            return value, value

        result, values = self.run_and_gather(what, run_if_chosen)
        return cast("T", result if is_chosen else values[index])

    def run_and_gather(self, what: str, work: Callable[[], tuple[S, T]]) -> tuple[S, list[T]]:
        """As `together`; each rank keeps one result, and sends another. All ranks.

        Args:
            what: as for `together`.
            work: returns a pair: what this rank keeps, and what it sends, which must pickle.

        Returns:
            What this rank keeps, the very object, and what each rank has sent.

        Raises:
            AnyrankError: as `together`.
        """
        if self.connections is None:
            result, value = work()
            return result, [value]
        connections = self.ready()
        result, cause = None, None
        self._depth += 1
        try:
            result, value = work()
            answer = pickle.dumps((value, None))
        except Exception as error:
            if connections.has_failed:  # the other ranks raise its error as well
                raise connections.state.as_error() from error
            cause = error
            answer = pickle.dumps((None, as_failure(error)))
        finally:
            self._depth -= 1
        answers = self._gather(connections, answer, what)()
        self.raise_failures(what, [failure for _, failure in answers], cause)
        return cast("S", result), [value for value, _ in answers]

    def start_together(
        self, what: str, cause: Exception | None, value: Any = None
    ) -> Callable[[], list[Any]]:
        """As `together` of work that is done, in two halves: sends what it raised, or its value,
        and returns a function that waits for all, and raises if any rank has failed, or returns
        the values. All ranks.
        """
        answer = (None if cause is None else as_failure(cause), value)
        wait = lambda: [answer]  # noqa: E731
        if self.connections is not None:
            wait = self._gather(self.ready(), pickle.dumps(answer), what)

        def take() -> list[Any]:
            answers = wait()
            self.raise_failures(what, [failure for failure, _ in answers], cause)
            return [value for _, value in answers]

        return take

    def raise_failures(
        self, what: str, failures: Sequence[Failure | None], cause: Exception | None
    ) -> None:
        """Raise if any of the ranks has failed.

        Args:
            what: as for `together`.
            failures: of each rank.
            cause: what this rank's work raised.

        Raises:
            AnyrankError: as `together`; of one process the cause itself.
        """
        if self.connections is None and cause is not None:
            raise cause
        by_rank = zip(self.ranks, failures, strict=True)
        known = {rank: failure for rank, failure in by_rank if failure is not None}
        if known:
            raise join_failures(what, known, self.size) from cause

    # -- values -----------------------------------------------------------------------------------

    def gather(self, value: T, what: str = "exchanging values") -> list[T]:
        """Every rank's value, in the group's order. All ranks.

        Args:
            value: anything that pickles. Over 64 KiB of one rank alone goes faster by `run_on_one`.
            what: what the ranks do, the same on all of them.

        Raises:
            RankError: a rank has died or did not come, named if known; or does something else.
        """
        if self.connections is None:
            return [value]
        return self._gather(self.ready(), pickle.dumps(value), what)()

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank. All ranks.

        Raises:
            RankError: as `gather`.
        """
        return any(self.gather(flag, what))

    def start_any(self, flag: bool, what: str) -> Callable[[], bool]:
        """As `any`, in two halves: sends the flag, and returns a function that waits. All ranks."""
        if self.connections is None:
            return lambda: flag
        wait = self._gather(self.ready(), pickle.dumps(flag), what)
        return lambda: any(wait())

    def ready(self) -> Connections:
        """The connections; new ones if the ranks have failed on them and all of them live."""
        connections = self.connections
        assert connections is not None
        if connections.has_failed and not self._depth and not connections.state.has_dead_rank:
            return self._connect()
        return connections

    def _gather(self, connections: Connections, data: bytes, what: str) -> Callable[[], list[Any]]:
        """Send a pickled value; returns a function that waits for every rank's."""
        texts = (str(self.number), self.call[:NAME_CHARACTERS], what[:NAME_CHARACTERS])
        start = b"".join(text.encode() + b"\0" for text in (*texts, str(len(data))))
        is_short = len(start) + len(data) <= HEAD_BYTES
        wait_for_heads = connections.allgather(start + data * is_short, HEAD_BYTES, what)

        def wait() -> list[Any]:
            heads = [head.split(b"\0", len(texts) + 1) for head in wait_for_heads()]
            names = {r: head[: len(texts)] for r, head in zip(self.ranks, heads, strict=True)}
            if any(name != heads[0][: len(texts)] for name in names.values()):
                text = _describe_crossing(names, self.name_ranks)
                raise connections.fail(connections.state.end(text, self.ranks, "another call"))
            values = [inline for *_, inline in heads]  # with zeros behind it: a pickle has an end
            sizes = {index: int(size) for index, (*_, size, _) in enumerate(heads)}
            sizes = {index: size for index, size in sizes.items() if size > len(values[index])}
            limit_bytes = max(2 * sum(sizes.values()), PADDED_BYTES * self.size)
            if len(sizes) > 1 and max(sizes.values()) * self.size <= limit_bytes:
                payload = data if self.index in sizes else b""
                for index, tail in enumerate(
                    connections.allgather(payload, max(sizes.values()), what)()
                ):
                    if index in sizes:
                        values[index] = tail
            else:
                for index, size in sizes.items():
                    values[index] = connections.broadcast(data, size, index, what)
            return [pickle.loads(value) for value in values]  # noqa: S301 - from our own ranks

        return wait

    def end(self, why: str, is_death: bool) -> RankError | None:
        """End what the ranks do, from one rank and without a wait: the others' waits raise an error
        with this reason. The next call connects the ranks anew.

        Args:
            why: the reason.
            is_death: whether this rank leaves because another died.

        Returns:
            The error of the rank that was the first to end it; None in a process alone.
        """
        if self.connections is None:
            return None
        state = self.connections.state
        if not self.connections.has_failed:
            self.connections.fail(state.end(why, [self.rank], NO_ANSWER if is_death else why))
        return state.as_error() if state.error is not None else None


def one_process() -> Ranks:
    """This process alone, whatever groups there are."""
    return Ranks((0,), 0)


@contextlib.contextmanager
def open_ranks(
    process_group: Group = None, call: str = "this call", *, may_be_alone: bool = False
) -> Generator[Ranks, None, None]:
    """The ranks of a group, of the default group, or of this process alone. All ranks of the group.

    The first call opens their connections, later calls use them again.

    Args:
        process_group: see `Group`.
        call: what the ranks call, the same on each: "load()".
        may_be_alone: whether one of several processes that are in no group yet is only warned, as
            models are built and filled before.

    Raises:
        AnyrankError: several processes were started, and they are in no group.
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC.
    """
    if not may_be_alone:
        check_has_group(process_group, call)
    elif lacks_group(process_group):
        warn_of_no_group()
    ranks, rank = find_members(process_group)
    yield Ranks(ranks, rank, call)


def _describe_crossing(
    names: Mapping[int, Sequence[bytes]], name_ranks: Callable[[Sequence[int]], str]
) -> str:
    """An error's text for ranks that do different things: the number and name of a call, and what
    it does.
    """
    texts = {rank: [part.decode() for part in name] for rank, name in names.items()}
    actions = {rank: what for rank, (_, _, what) in texts.items()}
    if len({*actions.values()}) == 1:
        actions = {rank: call for rank, (_, call, _) in texts.items()}
    if len({*actions.values()}) == 1:
        actions = {rank: f"{call}, its call {number}" for rank, (number, call, _) in texts.items()}
    text = describe_values("ranks do different things at the same place", actions, name_ranks)
    return f"{text}: make the same calls on all ranks, in the same order"
