"""Short messages between the ranks of one machine, over sockets of our own.

An agreement takes some 20 microseconds so, and 500 of CPU time through gloo, whose threads hand it
on to each other. Sockets of this kind keep the bounds of messages, and tell at once when a process
has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MAX_BYTES = 16 << 10  # of a message: a socket takes several without a reader
CONNECT_SEC = 5.0  # ranks that have met connect in a millisecond
LOOK_SEC = 0.2  # how often a rank that waits looks whether it waits in vain


class Address(NamedTuple):
    """Where a rank is reached: a name that everybody on the machine can list, and a secret that a
    caller has to know.
    """

    name: bytes
    secret: bytes


class Door:
    """Takes the connections of the ranks that come after this one.

    Args:
        size: number of ranks.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise OSError("names of sockets that are no files are Linux's")
        self.address = Address(b"\0anyrank-" + secrets.token_bytes(16), secrets.token_bytes(16))
        self.socket = _new_socket()
        self.socket.bind(self.address.name)
        self.socket.listen(size)

    def connect(
        self, index: int, addresses: Sequence[Address], others: dict[int, socket.socket]
    ) -> None:
        """Connect with all other ranks. All ranks; none waits for another to come here.

        Args:
            index: of this rank.
            addresses: of all ranks.
            others: gets the connections, by the index of the other rank.

        Raises:
            OSError: a rank does not answer within CONNECT_SEC.
        """
        hello = index.to_bytes(4, "little")
        for before, (name, secret) in enumerate(addresses[:index]):
            with contextlib.ExitStack() as undo:
                made = undo.enter_context(_new_socket())
                made.connect(name)
                made.send(secret + hello)
                undo.pop_all()
            others[before] = made
        end = time.monotonic() + CONNECT_SEC
        while len(others) < len(addresses) - 1:
            if time.monotonic() > end:
                raise TimeoutError("not all ranks have connected")
            caller, _ = self.socket.accept()
            caller.settimeout(CONNECT_SEC)
            secret, hello = (data := caller.recv(20))[:16], data[16:]
            if secrets.compare_digest(secret, self.address.secret):
                others[int.from_bytes(hello, "little")] = caller
            else:
                caller.close()


class LocalSockets:
    """A rank's connections with all others.

    Args:
        index: of this rank.
        others: the connections, by the index of the other rank.
        seconds: until a wait fails.
        in_vain: says why a wait cannot end, or nothing.
    """

    def __init__(
        self,
        index: int,
        others: dict[int, socket.socket],
        seconds: float,
        in_vain: Callable[[], str],
    ) -> None:
        self.index, self.others, self.seconds = index, others, seconds
        self.in_vain = in_vain
        self.process = os.getpid()
        self.started = 0  # exchanges; each rank sends one message in each, so they are counted
        self.received = dict.fromkeys(others, 0)
        self.inbox: dict[tuple[int, int], bytes] = {}  # by rank and exchange
        for each in others.values():
            each.settimeout(LOOK_SEC)

    def start(self, data: bytes) -> Callable[[], list[bytes]]:
        """Send a message to all ranks; what waits for theirs, in order. All ranks.

        What is started need not be waited for, or in another order.

        Args:
            data: 1 to MAX_BYTES bytes.

        Raises:
            RuntimeError: a rank is gone, here or where it is waited for.
        """
        number, self.started = self.started, self.started + 1
        for each in self.others.values():
            self._patiently(lambda each=each: each.send(data))

        def wait() -> list[bytes]:
            found = {index: self._receive(index, number) for index in self.others}
            found[self.index] = data
            return [found[index] for index in sorted(found)]

        return wait

    def _receive(self, index: int, number: int) -> bytes:
        """The message of one rank in one exchange."""
        while self.received[index] <= number:
            got = self._patiently(lambda: self.others[index].recv(MAX_BYTES))
            if not got:
                raise RuntimeError(f"rank {index} of the group has closed its connection")
            self.inbox[index, self.received[index]] = got
            self.received[index] += 1
        return self.inbox.pop((index, number))

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""
        for each in self.others.values():
            if os.getpid() == self.process:  # a forked worker may hold a copy, and keep it open
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _patiently(self, call: Callable[[], T]) -> T:
        end = time.monotonic() + self.seconds
        while True:
            try:
                return call()
            except TimeoutError:
                reason = self.in_vain()
                if reason or time.monotonic() > end:
                    raise RuntimeError(reason or f"no answer for {self.seconds:.0f} s") from None
            except OSError as error:
                raise RuntimeError(f"the connection with a rank broke: {error}") from error


def open_door(size: int) -> Door | None:
    """Where the other ranks of this machine can connect; None on a system without such sockets."""
    try:
        return Door(size)
    except OSError:
        return None


def connect_locally(
    door: Door | None,
    index: int,
    addresses: Sequence[Address | None],
    seconds: float,
    in_vain: Callable[[], str],
) -> LocalSockets | None:
    """The connections of all ranks; None on all of them where some cannot be made. All ranks.

    Ranks in different network namespaces of one machine cannot reach each other.

    Args:
        door: of this rank.
        index: of this rank.
        addresses: of the doors of all ranks.
        seconds: as for `LocalSockets`.
        in_vain: as for `LocalSockets`.
    """
    others: dict[int, socket.socket] = {}
    known = [address for address in addresses if address is not None]
    if door is not None:
        with door.socket, contextlib.suppress(OSError):
            if len(known) == len(addresses):
                door.connect(index, known, others)
    local = LocalSockets(index, others, seconds, in_vain)
    is_whole = len(others) == len(addresses) - 1
    with contextlib.suppress(RuntimeError):
        # A rank that lacks a connection says so on those that it has: then all of them learn of it.
        answers = local.start(b"1" if is_whole else b"0")()
        if is_whole and b"0" not in answers:
            return local
    local.close()
    return None


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(CONNECT_SEC)
    return made
