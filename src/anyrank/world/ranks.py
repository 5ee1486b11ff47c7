"""The processes of a call; the same code works without a process group, on one rank and on many.

All messages use connections that `torch.distributed` does not know, so they neither interfere with
the user's groups nor need an accelerator. A function whose docstring says "Collective." agrees with
the other ranks here: every rank must call it, in the same order.

Ranks communicate through a tree: each sends and receives a few messages of a few bytes, however
many ranks there are. So values are merged on the way (`reduce`). Only the first rank gets a list of
all ranks' values (`collect`), unless a comment says why every rank needs it (`gather`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import pickle
import socket
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

from anyrank.errors import RankError
from anyrank.world.agreement import (
    NAME_CHARACTERS,
    Action,
    Agreement,
    DifferentActions,
    Merge,
)
from anyrank.world.connections import Connections
from anyrank.world.failures import (
    NO_ANSWER,
    Interrupted,
    describe_texts,
)
from anyrank.world.first_ranks import FirstRanks, name_ranks
from anyrank.world.group import (
    Group,
    check_has_group,
    find_members,
    lacks_group,
    warn_about_no_group,
)
from anyrank.world.rendezvous import get_connections

__all__ = ["Interrupted", "Ranks", "one_process", "open_ranks"]

S = TypeVar("S")
T = TypeVar("T")

PART = struct.Struct("<IQ")  # before each rank's value in a list of them: its position, its length


class Ranks:
    """The ranks that take part in a call. Every rank must call the methods that say "Collective.".

    The `what` of a method must be the same on every rank. Values must pickle. Each of these methods
    raises the same error on every rank:

    - AnyrankError: work failed on a rank. The error has the class that the first failing rank
      raised, and lists each cause. It is a RankError for an exception that is not one of anyrank's.
    - RankError: a rank has died or did not arrive, and is named if known; or it made a different
      call.

    Args:
        ranks: their global ranks, in the group's order.
        rank: this process's global rank.
        call: the call that the ranks make, for messages.
        channel: 0, or the number of the connections that a thread has for itself.

    Attributes:
        nodes: for each of `ranks`, the index of its machine.
        hosts: for each machine, its name.

    Raises:
        RankError: not every rank arrived within ANYRANK_TIMEOUT_SEC.
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
        self._depth = 0  # agreements in progress; one may run in the work of another
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
        """The position of this rank in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def node(self) -> int:
        """The index of this rank's machine."""
        return self.nodes[self.index]

    @property
    def ranks_on_node(self) -> int:
        """The number of ranks on this machine."""
        return self.nodes.count(self.node)

    def name_ranks(self, ranks: Sequence[int] | FirstRanks) -> str:
        """Return ranks as text, with their machines if there are several."""
        connections = self.connections
        return connections.state.name_ranks(ranks) if connections else name_ranks(ranks)

    # -- work that may fail -----------------------------------------------------------------------

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, every rank raises. Collective.

        `work` must not wait for other ranks, unless it still answers them after its own failure.

        Returns:
            The object that this rank's work returned, which is not sent.
        """
        return self._run("run", what, lambda: (work(), b""), b"".join, goes_down=False)[0]

    def run_on_one(self, what: str, work: Callable[[], T], rank: int | None = None) -> T:
        """Run `work` on one rank, by default the first; return its result on every rank.
        Collective.

        That rank gets the object itself, the others get a copy.
        """
        if self.connections is None:
            return work()
        is_chosen = self.rank == (self.ranks[0] if rank is None else rank)

        def run_if_chosen() -> tuple[T | None, bytes]:
            value = work() if is_chosen else None
            return value, pickle.dumps(value) if is_chosen else b""

        value, data = self._run("one", what, run_if_chosen, b"".join)
        return cast("T", value if is_chosen else pickle.loads(data))  # noqa: S301 - from our ranks

    def run_and_reduce(
        self, what: str, work: Callable[[], tuple[S, T]], merge: Callable[[T, T], T]
    ) -> tuple[S, T]:
        """Run `work` on every rank; each keeps one result and shares a second one. Collective.

        Args:
            what: what the ranks do, for messages.
            work: returns a pair: what this rank keeps, and what it shares.
            merge: merges what two ranks share. It also runs on other ranks and in a different
                thread, so it must be quick and free of side effects, and the order and grouping of
                values must not matter.

        Returns:
            The object that this rank keeps, and the merge of what all ranks share.
        """
        if self.connections is None:
            return work()
        kept, data = self._run("reduce", what, _pickled(work), _merging(merge))
        return kept, pickle.loads(data)  # noqa: S301 - from our own ranks

    def run_and_collect(
        self, what: str, work: Callable[[], tuple[S, T]]
    ) -> tuple[S, list[T] | None]:
        """Run `work` as `run_and_reduce` does; the first rank gets a list of all values.
        Collective.

        The list is in the group's order; the other ranks get None.
        """
        if self.connections is None:
            kept, value = work()
            return kept, [value]
        kept, data = self._run("collect", what, self._part(work), b"".join, goes_down=False)
        return kept, self._parts(data) if self.index == 0 else None

    def run_and_gather(self, what: str, work: Callable[[], tuple[S, T]]) -> tuple[S, list[T]]:
        """Run `work` as `run_and_reduce` does; every rank gets a list of all values. Collective.

        The list is in the group's order. Because each rank gets as many values as there are ranks,
        a value has at most 64 bytes, and a comment at the call says why every rank needs all of
        them.
        """
        if self.connections is None:
            kept, value = work()
            return kept, [value]
        kept, data = self._run("gather", what, self._part(work), b"".join)
        return kept, self._parts(data)

    # -- values -----------------------------------------------------------------------------------

    def reduce(self, what: str, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge the values of all ranks; see `run_and_reduce`. Collective."""
        return self.run_and_reduce(what, lambda: (None, value), merge)[1]

    def any(self, what: str, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective."""
        return self.reduce(what, flag, operator.or_)

    def collect(self, what: str, value: T) -> list[T] | None:
        """Return all ranks' values, in the group's order, on the first rank; None elsewhere.
        Collective.
        """
        return self.run_and_collect(what, lambda: (None, value))[1]

    def gather(self, what: str, value: T) -> list[T]:
        """Return every rank's value, in the group's order; see `run_and_gather`. Collective."""
        return self.run_and_gather(what, lambda: (None, value))[1]

    def start_reduce(
        self, what: str, cause: Exception | None, value: T, merge: Callable[[T, T], T]
    ) -> Callable[[], T]:
        """Start the agreement of `run_and_reduce` on work that is already done. Collective.

        It continues in a thread; the returned function waits for its end.

        Args:
            what: what the ranks do, for messages.
            cause: the error that the work raised.
            value: the value that this rank shares, if its work did not fail.
            merge: as for `run_and_reduce`.
        """
        if self.connections is None:
            return _done(value, cause)
        data = pickle.dumps(None if cause else value)
        wait = self._start(self.ready(), "reduce", what, data, cause, _merging(merge))
        return lambda: pickle.loads(wait())  # noqa: S301 - from our own ranks

    def start_any(self, what: str, flag: bool) -> Callable[[], bool]:
        """Start what `any` does; the returned function waits for it. Collective."""
        return self.start_reduce(what, None, flag, operator.or_)

    # ---------------------------------------------------------------------------------------------

    def ready(self) -> Connections:
        """Return the connections; open new ones if a call failed on them and no rank has died."""
        connections = self.connections
        assert connections is not None
        if connections.has_failed and not self._depth and not connections.state.has_dead_rank:
            return self._connect()
        return connections

    def _run(
        self,
        kind: str,
        what: str,
        work: Callable[[], tuple[S, bytes]],
        merge: Merge,
        *,
        goes_down: bool = True,
    ) -> tuple[S, bytes]:
        """Run work that returns what this rank keeps and what it shares, and agree. Collective."""
        if self.connections is None:
            return work()
        connections = self.ready()
        kept, data, cause = None, b"", None
        self._depth += 1
        try:
            kept, data = work()
        except Exception as error:
            if connections.has_failed:  # the other ranks raise its error as well
                raise connections.state.as_error() from error
            cause = error
        finally:
            self._depth -= 1
        agreed = self._start(connections, kind, what, data, cause, merge, goes_down=goes_down)()
        return cast("S", kept), agreed

    def _start(
        self,
        connections: Connections,
        kind: str,
        what: str,
        data: bytes,
        cause: Exception | None,
        merge: Merge,
        *,
        goes_down: bool = True,
    ) -> Callable[[], bytes]:
        """Start an agreement; return a function that waits for the merged data. Collective."""
        action = Action(self.number, self.call[:NAME_CHARACTERS], what[:NAME_CHARACTERS])
        agreement = Agreement(connections, action, kind, data, cause, merge, goes_down=goes_down)
        wait_for = connections.talk(agreement.run, what)

        def wait() -> bytes:
            outcome = wait_for()
            if isinstance(outcome, DifferentActions):
                text = _describe_call_mismatch(outcome.actions, self.name_ranks)
                ranks = [rank for some in outcome.actions.values() for rank in some.ranks]
                error = connections.state.end(text, ranks, "another call")
                raise connections.fail(error) from cause
            if isinstance(outcome, Exception):
                raise outcome from cause
            return outcome

        return wait

    def _part(self, work: Callable[[], tuple[S, T]]) -> Callable[[], tuple[S, bytes]]:
        """Wrap work so that its value has the form that `_parts` reads."""

        def run() -> tuple[S, bytes]:
            kept, value = work()
            data = pickle.dumps(value)
            return kept, PART.pack(self.index, len(data)) + data

        return run

    def _parts(self, data: bytes) -> list[Any]:
        """Read the values of all ranks, in the group's order, from their parts in any order."""
        values, start = dict[int, Any](), 0
        while start < len(data):
            index, length = PART.unpack_from(data, start)
            start += PART.size + length
            values[index] = pickle.loads(data[start - length : start])  # noqa: S301 - our ranks'
        return [values[index] for index in sorted(values)]

    def end(self, why: str, is_death: bool) -> RankError | None:
        """End the group from one rank, without waiting: waits of the other ranks raise an error
        with this reason. The next call opens new connections.

        Args:
            why: the reason.
            is_death: whether this rank leaves because another rank died.

        Returns:
            The error of the rank that ended the group first; None if this process is alone.
        """
        if self.connections is None:
            return None
        state = self.connections.state
        if not self.connections.has_failed:
            self.connections.fail(state.end(why, [self.rank], NO_ANSWER if is_death else why))
        return state.as_error() if state.error is not None else None


def one_process() -> Ranks:
    """Return only this process, whatever groups exist."""
    return Ranks((0,), 0)


@contextlib.contextmanager
def open_ranks(
    process_group: Group = None, call: str = "this call", *, may_be_alone: bool = False
) -> Generator[Ranks, None, None]:
    """Open the ranks of a group; by default the default group, or only this process. Collective.

    The first call opens their connections, and later calls use them again.

    Args:
        process_group: see `Group`.
        call: name of the call that the ranks make, the same on each: "load()".
        may_be_alone: whether to log only a warning if several processes are not in a group yet,
            because models may be built and filled before the group exists.

    Raises:
        AnyrankError: several processes were started and are not in a group.
        RankError: not every rank arrived within ANYRANK_TIMEOUT_SEC.
    """
    if not may_be_alone:
        check_has_group(process_group, call)
    elif lacks_group(process_group):
        warn_about_no_group()
    ranks, rank = find_members(process_group)
    yield Ranks(ranks, rank, call)


# -- values as bytes ------------------------------------------------------------------------------


def _pickled(work: Callable[[], tuple[S, object]]) -> Callable[[], tuple[S, bytes]]:
    def run() -> tuple[S, bytes]:
        kept, value = work()
        return kept, pickle.dumps(value)

    return run


def _merging(merge: Callable[[T, T], T]) -> Merge:
    """Wrap a function that merges values, so that it merges pickled ones."""

    def merge_all(parts: Sequence[bytes]) -> bytes:
        if len(parts) == 1:
            return parts[0]
        values = (pickle.loads(part) for part in parts)  # noqa: S301 - from our own ranks
        return pickle.dumps(functools.reduce(merge, values))

    return merge_all


def _done(value: T, cause: Exception | None) -> Callable[[], T]:
    """Return a function that returns finished work at once, for a process alone."""

    def take() -> T:
        if cause is not None:
            raise cause
        return value

    return take


def _describe_call_mismatch(
    actions: Mapping[Action, FirstRanks], name_ranks: Callable[[Sequence[int] | FirstRanks], str]
) -> str:
    """Return the error text for ranks that called different operations, with each operation and its
    ranks.
    """
    tellings: list[Callable[[Action], str]] = [
        lambda action: action.what,
        lambda action: action.call,
        lambda action: f"{action.call} as call {action.number}",
    ]
    by_text: dict[str | None, FirstRanks] = {}
    for tell in tellings:
        by_text = {}
        for action, ranks in actions.items():
            text = tell(action)
            by_text[text] = by_text[text] + ranks if text in by_text else ranks
        if len(by_text) > 1:
            break
    text = describe_texts("ranks called different operations", by_text, name_ranks)
    return f"{text}. Make the same calls in the same order on every rank."
