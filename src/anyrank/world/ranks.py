"""The processes of one call: the same code with no process group, with one rank and with many.

All traffic runs on connections of our own, of which `torch.distributed` knows nothing: it neither
mixes with the user's groups nor needs an accelerator. A flag in the store lets a rank learn of
another's failure while it is busy reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import re
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from anyrank.errors import AnyrankError, RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.group import Group, default_store, members, named
from anyrank.world.meeting import Meeting, Met
from anyrank.world.store import Store, StoreLost, is_here
from anyrank.world.watch import TICK_SEC, Watch

T = TypeVar("T")

HEAD_BYTES = 512  # of a gathered value: most fit, and then one collective is enough
CHECK_SEC = 0.5  # how often a busy rank looks whether another has failed
ROLL_CALL_SEC = 3 * TICK_SEC  # how long survivors wait for one another before they name the dead
CONNECT_SEC = 120.0  # for connections between ranks that have just met
SHOWN_CHARACTERS = 100  # of an argument in a message


class Interrupted(Exception):
    """Another rank has failed; this one stops what it is doing and joins the agreement."""


@dataclass(frozen=True)
class Failure:
    """One rank's exception, as it travels. `kind` is None for a rank that only stopped for
    others.
    """

    kind: type[AnyrankError] | None
    text: str


@dataclass(frozen=True)
class Answer:
    """What one rank brings to an agreement."""

    value: Any
    failure: Failure | None


@dataclass(frozen=True)
class Lines:
    """What connects the ranks of a group.

    Attributes:
        group: gloo's connections, which count ranks by their position.
        store: the group's own part of the store.
        met: the group's name, and the ranks' machines.
    """

    group: Any
    store: Store
    met: Met


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

    def __init__(self, ranks: Sequence[int], rank: int, lines: Lines | None = None) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.lines = lines
        self.last_check = time.monotonic()
        self.round = 0  # of agreement; a failure in one does not stop the next
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.store_node: int | None = None
        if lines is None:
            return
        met = lines.met
        self.nodes, self.hosts, self.store_node = met.nodes, met.hosts, met.store_node
        self.watch = Watch(lines.store, rank, self.ranks, self.named, lines.group)
        # The first gather also waits until all are connected: a rank that closed the group before
        # would break a slower one's connecting.
        self.gather(None, "connecting the ranks")

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
        if len(self.hosts) == 1:
            return named(ranks)
        node_of = dict(zip(self.ranks, self.nodes, strict=True))
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(node_of[rank], []).append(rank)
        return ", ".join(f"{named(there)} on {self.hosts[n]}" for n, there in by_node.items())

    def gather(self, value: T, what: str = "exchanging values") -> list[T]:
        """Every rank's value, in the group's order. All ranks.

        Args:
            value: anything that pickles.
            what: what is done here, the same on all ranks.

        Raises:
            RankError: a rank has died or did not come, named where that can be told; or ranks do
                something else here.
        """
        if self.lines is None:
            return [value]
        data = pickle.dumps((what, value))
        sized = len(data).to_bytes(8, "little") + data
        with self._waiting(what):
            heads = self._gather_bytes(sized[:HEAD_BYTES], HEAD_BYTES)
            longest = max(int.from_bytes(head[:8], "little") for head in heads) + 8
            if longest > HEAD_BYTES:
                tails = self._gather_bytes(sized[HEAD_BYTES:], longest - HEAD_BYTES)
                heads = [head + tail for head, tail in zip(heads, tails, strict=True)]
        answers = [pickle.loads(head[8:]) for head in heads]  # noqa: S301 - from our own ranks
        if any(theirs != what for theirs, _ in answers):
            raise RankError(
                _different(
                    "ranks do different things at the same place",
                    {rank: theirs for rank, (theirs, _) in zip(self.ranks, answers, strict=True)},
                    self.named,
                )
                + ": make the same calls on all ranks, in the same order"
            )
        return [value for _, value in answers]

    def _gather_bytes(self, data: bytes, length: int) -> list[bytes]:
        every = [_as_tensor(b"", length) for _ in self.ranks]
        self.group.allgather(every, _as_tensor(data, length)).wait()
        return [_as_bytes(one) for one in every]

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank. All ranks.

        Raises:
            RankError: as `gather`.
        """
        if self.lines is None:
            return flag
        total = torch.tensor([int(flag)], device="cpu")
        with self._waiting(what):
            self.group.allreduce([total]).wait()
        return bool(total.item())

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
            works = [self.group.send([t], self.ranks.index(rank), 0) for t, rank in sent]
            works += [self.group.recv([t], self.ranks.index(rank), 0) for t, rank in received]
            for work in works:
                work.wait()

    @property
    def group(self) -> Any:
        """gloo's connections."""
        assert self.lines is not None
        return self.lines.group

    @contextmanager
    def _waiting(self, what: str) -> Generator[None, None, None]:
        self.watch.begin(what)
        try:
            yield
        except RuntimeError as error:
            raise self.roll_call(what) from error
        finally:
            self.watch.end()

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; when one fails, all raise. All ranks.

        `work` must not wait for other ranks, unless it goes on serving them after its own failure.

        Raises:
            AnyrankError: of the class that the first failing rank raised, with every cause;
                RankError for an exception that is not anyrank's own, and for a rank that died.
        """
        value, cause = None, None
        self.round += 1
        try:
            value = work()
        except Exception as error:
            if self.lines is None:
                raise
            cause = error
            self._raise_flag()
        failure = None if cause is None else _failure(cause)
        answers = self.gather(Answer(value, failure), what)
        failures = {r: a.failure for r, a in zip(self.ranks, answers, strict=True) if a.failure}
        if failures:
            raise _joined(what, failures, self.size) from cause
        return [answer.value for answer in answers]

    def from_one(self, what: str, rank: int, work: Callable[[], T]) -> T:
        """Run `work` on one rank and return its result on every rank. All ranks.

        Raises:
            AnyrankError: as `together`.
        """
        made: list[T] = []
        data = b""

        def here() -> tuple[int, bytes]:
            nonlocal data
            if self.rank == rank:
                made.append(work())
                data = b"" if self.lines is None else pickle.dumps(made[0])
            return len(data), data if len(data) <= HEAD_BYTES // 2 else b""  # what travels along

        length, small = max(self.together(what, here))
        if self.lines is None:
            return made[0]
        if small:
            return pickle.loads(small)  # noqa: S301 - from our own rank
        payload = _as_tensor(data, length)
        with self._waiting(what):
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(rank)
            self.group.broadcast([payload], options).wait()
        result: T = pickle.loads(_as_bytes(payload))  # noqa: S301 - from our own rank
        return result

    def same_arguments(
        self,
        call: str,
        arguments: Mapping[str, object],
        error: type[AnyrankError],
        check: Callable[[], object] | None = None,
    ) -> None:
        """Check a call's arguments, and compare them over the ranks. All ranks.

        Args:
            call: its name, "load".
            arguments: by name; compared by their repr, functions by their name.
            error: the class for arguments that differ.
            check: raises for arguments that are wrong in themselves.

        Raises:
            AnyrankError: arguments differ: of class `error`, with each value and its ranks. Or
                `check` raised it on some rank.
            ValueError, TypeError: `check` raised it on some rank.
            RankError: other ranks called something else.
        """
        problem: Exception | None = None
        try:
            if check is not None:
                check()
        except (AnyrankError, TypeError, ValueError) as raised:
            if self.lines is None:
                raise
            problem = raised
        mine = {name: _shown(value) for name, value in arguments.items()}
        bad = None if problem is None else (type(problem), str(problem))
        every = self.gather((mine, bad), f"{call}()")
        failed = {r: found for r, (_, found) in zip(self.ranks, every, strict=True) if found}
        if failed:
            raise _same_error(call, failed, self) from problem
        for name in mine:
            values = {r: table[name] for r, (table, _) in zip(self.ranks, every, strict=True)}
            if len(set(values.values())) > 1:
                text = _different(f"{call}(): {name}= differs between ranks", values, self.named)
                raise error(f"{text}: give all ranks the same")

    def check(self) -> None:
        """Stop early when another rank has failed; cheap enough for inner loops.

        Raises:
            Interrupted: to be passed through to `together`.
        """
        if self.lines is None or time.monotonic() - self.last_check < CHECK_SEC:
            return
        self.last_check = time.monotonic()
        if self.lines.store.has([self._flag]):
            raise Interrupted

    def roll_call(self, what: str) -> RankError:
        """The error that names the ranks which no longer answer. For survivors of a broken
        group.
        """
        assert self.lines is not None
        try:
            dead, late = self._call_roll(self.lines.store)
        except StoreLost as error:
            return RankError(self._without_store(str(error)))
        alive = {node for r, node in zip(self.ranks, self.nodes, strict=True) if r not in dead}
        gone = [host for node, host in enumerate(self.hosts) if node not in alive]
        if dead and gone:
            text = f"{self.named(dead)} died or does not answer: {', '.join(gone)} or the network "
            text += "to it is gone"
        elif dead:
            text = f"{self.named(dead)} died or does not answer: look at its log for the cause"
        elif late:
            text = f"{self.named(late)} did not come to {what!r}, though alive"
        else:
            text = "the connection between the ranks broke although all of them are alive"
        causes = dict.fromkeys(dead or late, "no answer")
        return RankError(text, causes=causes)  # chained to gloo's own error, which differs by rank

    def _call_roll(self, store: Store) -> tuple[list[int], list[int]]:
        """Ranks without a sign of life, and ranks that have not come to this agreement."""
        for key in (self._flag, "roll call", f"alive/{self.rank}", f"here/{self.rank}"):
            store.set(key, seconds=ROLL_CALL_SEC)
        waits = f"waits/{self.watch.number}"
        end = time.monotonic() + ROLL_CALL_SEC
        dead = late = list(self.ranks)
        while (dead or late) and time.monotonic() < end:
            dead = [r for r in dead if not store.has([f"alive/{r}"], ROLL_CALL_SEC)]
            late = [r for r in late if not store.has([f"{waits}/{r}"], ROLL_CALL_SEC)]
            late = [r for r in late if not store.has([f"here/{r}"], ROLL_CALL_SEC)]
            time.sleep(0.05)
        return dead, late

    def _without_store(self, text: str) -> str:
        """What the loss of the store means: the death of its process, or of its machine."""
        if self.store_node in (None, self.node):
            return f"{text}: the process that hosts it died"
        places = zip(self.ranks, self.nodes, strict=True)
        there = named([rank for rank, node in places if node == self.store_node])
        host = self.hosts[self.store_node or 0]
        return f"{text}: {host}, which hosts it and {there}, or the network to it is gone"

    @property
    def _flag(self) -> str:
        return f"failed/{self.round}"

    def _raise_flag(self) -> None:
        assert self.lines is not None
        with contextlib.suppress(StoreLost):  # the gather that follows reports what is wrong
            self.lines.store.set(self._flag)


def one_process() -> Ranks:
    """This process alone, whatever groups there are."""
    return Ranks((0,), 0)


@contextmanager
def open_ranks(
    process_group: Group = None, call: str = "this call"
) -> Generator[Ranks, None, None]:
    """The ranks of a group, of the default group, or of this process alone. All ranks of the group.

    Args:
        process_group: see `Group`.
        call: what the ranks call, the same on each: "load()".

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC, or some called something else.
    """
    ranks, rank = members(process_group)
    if len(ranks) == 1:
        yield Ranks(ranks, rank)
        return
    made = Ranks(ranks, rank, _connect(ranks, rank, call))
    try:
        yield made
    finally:
        made.watch.close()
        made.lines = None


def _connect(ranks: Sequence[int], rank: int, call: str) -> Lines:
    seconds, shared = TIMEOUT_SEC.get(), default_store()
    lobby = Store(shared, "anyrank")
    try:
        met = Meeting(lobby, ranks, rank, call, seconds, is_here(shared)).hold()
    finally:
        lobby.close()
    store = Store(shared, f"anyrank/{met.name}")
    limit = min(seconds, CONNECT_SEC)

    def connect(inner: Any) -> Any:
        # Not new_group(), whose names and keys the user's groups share.
        group = dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
            inner, ranks.index(rank), len(ranks), timedelta(seconds=limit)
        )
        group.set_timeout(timedelta(seconds=seconds))
        return group

    try:
        return Lines(store.call(connect, limit + 5), store, met)
    except StoreLost as error:
        store.close()
        raise RankError(
            f"{call}: rank {rank} could not connect to the other ranks within {limit:.0f} s: "
            f"{error}"
        ) from error


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Bytes as a tensor of at least their length, padded with zeros."""
    tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, min(len(data), length))
    return tensor


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _shown(value: object) -> str:
    """An argument as it is compared: without addresses, which differ from process to process."""
    name = getattr(value, "__qualname__", None)
    return str(name) if callable(value) and name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _different(title: str, values: Mapping[int, str], name: Callable[[Sequence[int]], str]) -> str:
    """Values by rank, in words."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    each = (f"{v[:SHOWN_CHARACTERS]} on {name(ranks)}" for v, ranks in by_value.items())
    return f"{title}: {', '.join(each)}"


def _same_error(
    call: str, failed: Mapping[int, tuple[type[Exception], str]], ranks: Ranks
) -> Exception:
    """What some ranks' checks raised, equal on all ranks."""
    kind, text = next(iter(failed.values()))
    if issubclass(kind, AnyrankError):
        failures = {r: Failure(k, t) for r, (k, t) in failed.items() if issubclass(k, AnyrankError)}
        return _joined(f"{call}()", failures, ranks.size)
    if len(failed) < ranks.size:
        text = f"{text} (on {ranks.named(list(failed))})"
    return kind(text)


def _failure(error: Exception) -> Failure:
    if isinstance(error, Interrupted):
        return Failure(None, "stopped, because another rank failed")
    if isinstance(error, AnyrankError):
        return Failure(type(error), str(error))
    return Failure(RankError, f"{type(error).__name__}: {error}")


def _joined(what: str, failures: dict[int, Failure], size: int) -> AnyrankError:
    """One error for all ranks, equal on all of them."""
    own = {rank: failure for rank, failure in failures.items() if failure.kind is not None}
    first = next(iter(own.values()), Failure(RankError, "all ranks stopped for one another"))
    causes = {rank: failure.text for rank, failure in own.items()}
    texts = set(causes.values())
    if len(own) == size and len(texts) == 1:
        message = first.text
    else:
        message = "\n".join(f"[rank {rank}] {text}" for rank, text in causes.items())
        message = f"{what} failed on {len(own)} of {size} ranks, so on all:\n{message}"
    return (first.kind or RankError)(message, causes=causes)
