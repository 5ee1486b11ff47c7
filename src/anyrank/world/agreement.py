"""One exchange between all ranks through a tree: a few bytes go up and are merged on the way, and
the result goes down again.

A message up holds a digest of what its rank does, and a value. If a rank does something else or
has failed, the root asks all ranks once more: accounts then go up, which say who does what and who
has failed how, and the error goes down, the same for all.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from anyrank import faults
from anyrank.world.connections import Connections
from anyrank.world.failures import Failure, as_failure, join_failures
from anyrank.world.first_ranks import FirstRanks, join_first
from anyrank.world.message import END, ENDED, FINE, HEAD_BYTES, TROUBLE, Message
from anyrank.world.waits import POLL_SEC

CONNECTING = "connecting the ranks"
NAME_CHARACTERS = 100  # of `call` and `what`, as the ranks compare them

Merge = Callable[[Sequence[bytes]], bytes]
"""Joins the values of some ranks, in the tree's order: this rank's own is the first."""


@dataclass(frozen=True)
class Action:
    """One rank's action: the number and the name of its call, and what it does in it."""

    number: int
    call: str
    what: str

    def digest(self, kind: str) -> bytes:
        text = "\0".join((str(self.number), self.call, self.what, kind))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Account:
    """Who does what, and who has failed how, of some ranks: the first few of each."""

    actions: dict[Action, FirstRanks]
    failures: dict[Failure, FirstRanks]
    failed: int  # ranks that have raised something

    def __add__(self, other: Account) -> Account:
        return Account(
            join_first(self.actions, other.actions),
            join_first(self.failures, other.failures),
            self.failed + other.failed,
        )


class DifferentActions(Exception):
    """Ranks do different things at the same place.

    Args:
        actions: each action, with the ranks that do it.
    """

    def __init__(self, actions: Mapping[Action, FirstRanks]) -> None:
        super().__init__(actions)
        self.actions = actions


class Agreement:
    """One rank's part in an exchange between all ranks.

    Args:
        connections: connections of the ranks.
        action: what this rank does.
        kind: name of the primitive, which must also be equal on all ranks.
        value: bytes that this rank contributes.
        cause: error that this rank's work raised.
        merge: joins values.
        goes_down: whether all ranks get the merged value.
    """

    def __init__(
        self,
        connections: Connections,
        action: Action,
        kind: str,
        value: bytes,
        cause: Exception | None,
        merge: Merge,
        *,
        goes_down: bool,
    ) -> None:
        self.connections, self.neighbors = connections, connections.neighbors
        self.action, self.digest = action, action.digest(kind)
        self.value, self.merge, self.goes_down = value, merge, goes_down
        self.failure = None if cause is None else as_failure(cause)
        self.start_sec = time.monotonic()

    def run(self) -> bytes | Exception:
        """Return the merged value or the error of all ranks.

        The value is on all ranks, or on the root alone and b"" elsewhere; the error is
        `DifferentActions`, or one as from `Ranks.run`.

        Raises:
            RuntimeError: gloo failed because a rank died.
            RankError: the ranks have ended.
        """
        status, value = self._exchange(self._merged)
        if status == TROUBLE:
            status, value = self._exchange(self._accounted)
        return pickle.loads(value) if status == END else value  # noqa: S301 - from our own ranks

    def _exchange(self, join: Callable[[Sequence[Message]], Message]) -> tuple[int, bytes]:
        """Send up what this rank and those below come to; returns what comes down."""
        connections, parent = self.connections, self.neighbors.parent
        heads = [connections.receive(HEAD_BYTES, child) for child in self.neighbors.children]
        children = zip(heads, self.neighbors.children, strict=True)
        joined = join([self._received(head, child) for head, child in children])
        faults.point("ranks.talk")
        if parent is None:
            verdict = joined
            self._check_not_ended()
        else:
            head = connections.receive(HEAD_BYTES, parent)
            self._send(joined, parent)
            verdict = self._received(head, parent)
        faults.point("ranks.talk")
        down = verdict if self.goes_down or verdict.status else replace(verdict, value=b"")
        sent = [self._start(down, child) for child in self.neighbors.children]
        for waits in sent:
            for wait in waits:
                wait()
        return verdict.status, verdict.value

    def _check_not_ended(self) -> None:
        """Check, before the root says that all succeeded, that no rank gave up waiting and left.

        Raises:
            RankError: the ranks have ended.
        """
        state = self.connections.state
        if time.monotonic() - self.start_sec > POLL_SEC and state.has_ended():
            raise state.as_error()

    def _merged(self, below: Sequence[Message]) -> Message:
        """The values of this rank and of those below."""
        is_fine = self.failure is None and all(
            message.status == FINE and message.digest == self.digest for message in below
        )
        if is_fine:
            try:
                value = self.merge([self.value, *(message.value for message in below)])
                return Message(self.digest, FINE, value)
            except Exception as error:
                self.failure = as_failure(error)
        return Message(self.digest, TROUBLE, b"")

    def _accounted(self, below: Sequence[Message]) -> Message:
        """The accounts of this rank and of those below; of all of them the root makes the error."""
        state, failure = self.connections.state, self.failure
        own_rank = FirstRanks.first_of([state.rank])
        account = Account({self.action: own_rank}, {}, 0)
        if failure is not None:
            account.failures[failure] = own_rank
            account.failed = 0 if failure.kind is None else 1
        for message in below:
            account += pickle.loads(message.value)  # noqa: S301 - from our own ranks
        if self.neighbors.parent is not None:
            return Message(self.digest, TROUBLE, pickle.dumps(account))
        error: Exception = DifferentActions(account.actions)
        if len(account.actions) == 1:
            size = len(state.ranks)
            error = join_failures(self.action.what, account.failures, account.failed, size)
        return Message(self.digest, END, pickle.dumps(error))

    # -- messages ---------------------------------------------------------------------------------

    def _start(self, message: Message, index: int) -> list[Callable[[], None]]:
        """Start to send a message; returns the waits."""
        return [self.connections.send(part, index) for part in message.parts]

    def _send(self, message: Message, index: int) -> None:
        for wait in self._start(message, index):
            wait()

    def _received(self, head: Callable[[], bytes], index: int) -> Message:
        """A message whose head is on its way.

        Raises:
            RankError: that rank has ended what the ranks do.
        """
        message = Message.unpack(head(), lambda length: self.connections.receive(length, index)())
        if message.status == ENDED:
            state = self.connections.state
            state.error = pickle.loads(message.value)  # noqa: S301 - from our own ranks
            raise state.as_error()
        return message


def connect_neighbors(connections: Connections) -> None:
    """Send the first messages, so that neighbors in the tree connect. All ranks."""
    agreement = Agreement(
        connections, Action(0, "", CONNECTING), "", b"", None, b"".join, goes_down=False
    )
    connections.talk(agreement.run, CONNECTING)()
