"""The processes of one call: the same code with no process group, with one rank and with many.

All traffic runs on a gloo group of our own, so it neither mixes with the user's collectives nor
needs an accelerator; a flag in the store lets a rank learn of another's failure while it is busy
reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from anyrank.errors import AnyrankError, RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.device import boot_id

T = TypeVar("T")

HEAD_BYTES = 512  # of a gathered value: most fit, and then one collective is enough
CHECK_SEC = 0.5  # how often a busy rank looks whether another has failed
ROLL_CALL_SEC = 3.0  # how long survivors wait for one another before they name the dead


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


class Ranks:
    """The ranks that take part in a call. Every method with "all ranks" must be called by each.

    Attributes:
        ranks: their global ranks, in the group's order.
        rank: this process's global rank.
        nodes: for each of `ranks`, which machine it is on; machines count from 0.

    Raises:
        RankError: a rank died while the ranks met.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: Any, store: Any) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.group = group
        self.store = store
        self.last_check = time.monotonic()
        self.round = 0  # of agreement; a failure in one does not stop the next
        # The first gather also waits until all are connected: a rank that closed the group before
        # would break a slower one's connecting.
        names = self.gather((socket.gethostname(), boot_id()))
        self.nodes = tuple(sorted(set(names), key=names.index).index(name) for name in names)

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

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the group's order. All ranks.

        Raises:
            RankError: a rank has died or did not come, named where that can be told.
        """
        if self.group is None:
            return [value]
        data = pickle.dumps(value)
        sized = len(data).to_bytes(8, "little") + data
        try:
            heads = self._gather_bytes(sized[:HEAD_BYTES], HEAD_BYTES)
            longest = max(int.from_bytes(head[:8], "little") for head in heads) + 8
            if longest > HEAD_BYTES:
                tails = self._gather_bytes(sized[HEAD_BYTES:], longest - HEAD_BYTES)
                heads = [head + tail for head, tail in zip(heads, tails, strict=True)]
        except RuntimeError as error:
            raise self.roll_call() from error
        return [pickle.loads(head[8:]) for head in heads]  # noqa: S301 - from our own ranks

    def _gather_bytes(self, data: bytes, length: int) -> list[bytes]:
        every = [torch.empty(length, dtype=torch.uint8) for _ in self.ranks]
        dist.all_gather(every, _as_tensor(data, length), group=self.group)
        return [_as_bytes(one) for one in every]

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
            if self.group is None:
                raise
            cause = error
            self._raise_flag()
        failure = None if cause is None else _failure(cause)
        answers = self.gather(Answer(value, failure))
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
                data = b"" if self.group is None else pickle.dumps(made[0])
            return len(data), data if len(data) <= HEAD_BYTES // 2 else b""  # what travels along

        length, small = max(self.together(what, here))
        if self.group is None:
            return made[0]
        if small:
            return pickle.loads(small)  # noqa: S301 - from our own rank
        payload = _as_tensor(data, length)
        try:
            dist.broadcast(payload, src=rank, group=self.group)
        except RuntimeError as error:
            raise self.roll_call() from error
        result: T = pickle.loads(_as_bytes(payload))  # noqa: S301 - from our own rank
        return result

    def check(self) -> None:
        """Stop early when another rank has failed; cheap enough for inner loops.

        Raises:
            Interrupted: to be passed through to `together`.
        """
        if self.store is None or time.monotonic() - self.last_check < CHECK_SEC:
            return
        self.last_check = time.monotonic()
        if self.store.check([self._flag]):
            raise Interrupted

    def roll_call(self) -> RankError:
        """The error that names the ranks which no longer answer. For survivors of a broken
        group.
        """
        missing: list[int] | None = None
        try:
            self.store.set(self._flag, "1")
            self.store.set(f"alive/{self.rank}", "1")
            deadline = time.monotonic() + ROLL_CALL_SEC
            missing = list(self.ranks)
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not self.store.check([f"alive/{r}"])]
                time.sleep(0.05)
        except Exception:  # the store went with the process that hosted it
            missing = None
        if missing:
            named = ", ".join(f"rank {rank}" for rank in missing)
            text = f"{named} died or does not answer: look at its log for the cause"
        elif missing is None:
            text = "the connection to the ranks' store is gone: the process that hosts it died"
        else:
            text = "the connection between the ranks broke although all of them are alive"
        causes = dict.fromkeys(missing or (), "no answer")
        return RankError(text, causes=causes)  # chained to gloo's own error, which differs by rank

    @property
    def _flag(self) -> str:
        return f"failed/{self.round}"

    def _raise_flag(self) -> None:
        with contextlib.suppress(Exception):  # the gather that follows reports what is wrong
            self.store.set(self._flag, "1")


def one_process() -> Ranks:
    """This process alone, whatever groups there are."""
    return Ranks((0,), 0, None, None)


@contextmanager
def open_ranks(process_group: dist.ProcessGroup | None = None) -> Generator[Ranks, None, None]:
    """The ranks of a group, of the default group, or of this process alone. All ranks of the group.

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield one_process()
        return
    timeout = timedelta(seconds=TIMEOUT_SEC.get())
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if rank not in ranks:
        raise RankError(f"rank {rank} is not in the process group it called with, ranks {ranks}")
    if len(ranks) == 1:
        yield Ranks(ranks, rank, None, None)
        return
    try:
        group: Any = dist.new_group(
            ranks if process_group is not None else None,
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=process_group is not None,
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: not all of ranks {ranks} came here within {timeout.seconds} s: "
            f"call from all of them, or pass process_group= ({str(error).splitlines()[0][:200]})"
        ) from error
    made: list[Any] = [group]
    del group
    try:
        prefix = f"anyrank/{made[0].group_name}"
        store = dist.PrefixStore(prefix, _default_store())  # pyright: ignore[reportPrivateImportUsage]
        made.append(Ranks(ranks, rank, made[0], store))
        yield made[1]
    finally:
        with contextlib.suppress(ValueError):  # the caller has destroyed all groups before
            dist.destroy_process_group(made[0])
        _let_go(made)


def _let_go(made: list[Any]) -> None:
    """Drop the last references to a destroyed group, in a thread: to close its connections takes
    gloo 10 ms for each other rank, which nobody has to wait for.
    """
    for ranks in made[1:]:
        del ranks.group, ranks.store  # whoever uses them now is told
    try:
        threading.Thread(target=made.clear, name="anyrank-close").start()
    except RuntimeError:  # the interpreter ends
        made.clear()


def _default_store() -> Any:
    # No public name; the same private one has been there in every release since 1.8.
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _as_tensor(data: bytes, length: int) -> torch.Tensor:
    """Bytes as a tensor of at least their length, padded with zeros."""
    tensor = torch.zeros(length, dtype=torch.uint8)
    ctypes.memmove(tensor.data_ptr(), data, min(len(data), length))
    return tensor


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


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
