"""One exchange between all ranks through a tree: a few bytes go up, are merged on the way, and the
result goes down again.

A message up holds a digest of its rank's action, and a value. If the actions differ or a rank has
failed, the root asks all ranks once more: accounts go up, which say which ranks do what and how
they failed, and the same error goes down to every rank.
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
from anyrank.world.first_ranks import FirstRanks, join_ranks
from anyrank.world.message import END, ENDED, FINE, HEAD_BYTES, TROUBLE, Message
from anyrank.world.waits import POLL_SEC

CONNECTING = "connecting the ranks"
NAME_CHARACTERS = 100  # of `call` and `what`, which the ranks compare

Merge = Callable[[Sequence[bytes]], bytes]
"""Joins the values of some ranks, in the order of the tree: this rank's value is the first."""


@dataclass(frozen=True)
class Action:
    """One rank's action: the number and the name of its call, and what it does in that call."""

    number: int
    call: str
    what: str

    def digest(self, kind: str) -> bytes:
        text = "\0".join((str(self.number), self.call, self.what, kind))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Account:
    """What some ranks do, and how they have failed: the first few ranks of each."""

    actions: dict[Action, FirstRanks]
    failures: dict[Failure, FirstRanks]
    failed: int  # number of ranks that have raised an exception

    def __add__(self, other: Account) -> Account:
        return Account(
            join_ranks(self.actions, other.actions),
            join_ranks(self.failures, other.failures),
            self.failed + other.failed,
        )


class DifferentActions(Exception):
    """Raised if ranks take different actions at the same point.

    Args:
        actions: each action, with the ranks that take it.
    """

    def __init__(self, actions: Mapping[Action, FirstRanks]) -> None:
        super().__init__(actions)
        self.actions = actions


class Agreement:
    """One rank's part in an exchange between all ranks.

    Args:
        connections: connections of the ranks.
        action: the action of this rank.
        kind: name of the primitive, which must also be the same on every rank.
        value: bytes that this rank contributes.
        cause: error that this rank's work raised.
        merge: joins values.
        goes_down: whether every rank gets the merged value.
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

        Every rank gets the value, or only the root, and the others b"". The error is
        `DifferentActions`, or one that `Ranks.run` raises.

        Raises:
            RuntimeError: gloo failed because a rank died.
            RankError: another rank has ended the group.
        """
        status, value = self._exchange(self._merged)
        if status == TROUBLE:
            status, value = self._exchange(self._accounted)
        return pickle.loads(value) if status == END else value  # noqa: S301 - from our own ranks

    def _exchange(self, join: Callable[[Sequence[Message]], Message]) -> tuple[int, bytes]:
        """Send up the result of this rank and those below; return what comes down."""
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
        """Check, before the root reports success, that no rank has given up waiting.

        Raises:
            RankError: another rank has ended the group.
        """
        state = self.connections.state
        if time.monotonic() - self.start_sec > POLL_SEC and state.has_ended():
            raise state.as_error()

    def _merged(self, below: Sequence[Message]) -> Message:
        """Return the values of this rank and of those below."""
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
        """Return the accounts of this rank and those below, from which the root makes the error."""
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
        """Start to send a message; return functions that wait for it."""
        return [self.connections.send(part, index) for part in message.parts]

    def _send(self, message: Message, index: int) -> None:
        for wait in self._start(message, index):
            wait()

    def _received(self, head: Callable[[], bytes], index: int) -> Message:
        """Return a message whose head is being received.

        Raises:
            RankError: that rank has ended the group.
        """
        message = Message.unpack(head(), lambda length: self.connections.receive(length, index)())
        if message.status == ENDED:
            state = self.connections.state
            state.error = pickle.loads(message.value)  # noqa: S301 - from our own ranks
            raise state.as_error()
        return message


def connect_neighbors(connections: Connections) -> None:
    """Send the first messages, so that neighbors in the tree connect. Collective."""
    agreement = Agreement(
        connections, Action(0, "", CONNECTING), "", b"", None, b"".join, goes_down=False
    )
    connections.talk(agreement.run, CONNECTING)()
