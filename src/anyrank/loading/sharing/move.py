"""Move the bytes of a load or a sync: a rank's sends, receives and copies, in a bounded window.

Every rank works through its own part of one order. It starts the next message as soon as the
window has room, and finishes the oldest first, so that reading, sending and placing overlap.
Consecutive blocks between two ranks share a message, whose place in the order is that of its first
block. At the end of each round the ranks agree that none has failed; until then a failed rank
keeps to the order, and sends meaningless values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from anyrank import faults
from anyrank.files.reader import synchronize
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.messages import (
    ALIGN,
    MESSAGE_BYTES,
    WHAT,
    Message,
    aligned,
    messages_of,
)
from anyrank.loading.sharing.passing import Passing
from anyrank.loading.sharing.places import LocalMemory
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Interrupted, Ranks

T = TypeVar("T")


@dataclass(slots=True)
class _UnderWay:
    """A message that is being sent or received.

    Attributes:
        wait: a function that waits for its end.
        start, stop: its part of the window's memory; -1 if it needs none.
    """

    message: Message
    wait: Callable[[], None]
    start: int
    stop: int


class Mover:
    """The move of one load or sync. Collective: every rank must run the same rounds.

    Args:
        rounds: flows with this rank's transfers; ranks agree between two rounds that none failed.
        places: this rank's memory.
        ranks: ranks of the call.
        window_bytes: limit of the bytes that are being sent and received; 0 if this rank sends and
            receives nothing.
        sample: called from time to time, to measure memory.

    Attributes:
        sent, received, copied: bytes of this rank.
    """

    def __init__(
        self,
        rounds: Iterable[Sequence[Flow]],
        places: LocalMemory,
        ranks: Ranks,
        window_bytes: int,
        sample: Callable[[], None],
    ) -> None:
        self.rounds = rounds
        self.places = places
        self.ranks = ranks
        self.sample = sample
        self.window = window_bytes // ALIGN * ALIGN
        self.message_bytes = min(MESSAGE_BYTES, window_bytes // 4 or MESSAGE_BYTES)
        self.devices = places.devices
        self.memory = self._allocate(self.window)
        self.pending: deque[_UnderWay] = deque()
        self.under_way = 0
        self.problem: Exception | None = None
        self.sent = self.received = self.copied = 0

    def run(self) -> None:
        """Move everything. The caller agrees on failures of the last round.

        Raises:
            Interrupted: another rank failed.
            Exception: any failure on this rank.
        """
        for device in self.devices:  # the caller's streams may still use the moved memory
            synchronize(device)
        self._move()

    def _move(self) -> None:
        """Run all rounds. Raises like `run`."""
        for number, flows in enumerate(self.rounds):
            if number and self.ranks.any(WHAT, self.problem is not None):
                raise self.problem or Interrupted
            self._try(lambda flows=flows: self.places.begin(flows))
            self._round(self._messages(number, flows))
            self.sample()
        self._try(self.places.settle)
        if self.problem is not None:
            raise self.problem

    def _messages(self, number: int, flows: Sequence[Flow]) -> list[Message]:
        """Return the messages of the round with this number."""
        return messages_of(flows, self.message_bytes, self.places.piece_bytes)

    def _round(self, messages: Sequence[Message]) -> None:
        rank = self.ranks.rank
        with Passing(self.ranks, WHAT) as passing:
            for message in messages:
                if message.sender == message.receiver:
                    self._try(lambda m=message: self._copy(m))
                elif message.sender == rank:
                    self._send(message, passing)
                else:
                    self._receive(message, passing)
            while self.pending:
                self._finish_oldest()

    def _try(self, work: Callable[[], T]) -> T | None:
        """Return the result of work that may fail; None once anything has failed on this rank."""
        if self.problem is None:
            try:
                return work()
            except Exception as error:  # the other ranks still wait for this round's messages
                self.problem = error
        return None

    def _copy(self, message: Message) -> None:
        self.places.copy(message)
        self.copied += message.target_bytes

    def _send(self, message: Message, passing: Passing) -> None:
        self._make_room(message.nbytes)  # outside: a lost connection is not this rank's own error
        self._try(lambda: faults.point("sync.send"))
        memory, start = self._try(lambda: self._direct(message, is_source=True)), -1
        if memory is None:
            memory, start = self._stage(message)
            self._try(lambda: self._fill(message, memory))
        self._add(message, passing.send(memory, message.receiver), start)
        self.sent += message.payload

    def _receive(self, message: Message, passing: Passing) -> None:
        self._make_room(message.nbytes)
        self._try(lambda: faults.point("sync.receive"))
        memory, start = self._try(lambda: self._direct(message, is_source=False)), -1
        if memory is None:
            memory, start = self._stage(message)
        self._add(message, passing.receive(memory, message.sender), start)
        self.received += message.payload

    def _direct(self, message: Message, *, is_source: bool) -> torch.Tensor | None:
        """Return the tensor's own memory for a message if no staging is needed; else None."""
        first, *others = message.blocks
        if others or (is_source and self.places.is_computed(first.flow, first.transfer)):
            return None
        view = self.places.source_of(first) if is_source else self.places.target_of(first)
        if not view.is_cpu or view.dtype != first.flow.wire_dtype or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8)

    def _fill(self, message: Message, memory: torch.Tensor) -> None:
        """Read the values to send into the window."""
        self.places.pack(message, memory)
        self.places.settle()

    def _empty(self, message: Message, memory: torch.Tensor) -> None:
        """Put received values in place."""
        self.places.unpack(message, memory)
        self.places.settle()

    # -- the window ---------------------------------------------------------------------------

    def _add(self, message: Message, wait: Callable[[], None], start: int) -> None:
        stop = start if start < 0 else start + aligned(message.nbytes)
        self.pending.append(_UnderWay(message, wait, start, stop))
        self.under_way += message.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self.pending and self.under_way + nbytes > self.window:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self.pending.popleft()
        message = oldest.message
        oldest.wait()
        self.under_way -= message.nbytes
        if message.receiver == self.ranks.rank and oldest.start >= 0:
            memory = self.memory[oldest.start : oldest.start + message.nbytes]
            self._try(lambda: self._empty(message, memory))

    def _stage(self, message: Message) -> tuple[torch.Tensor, int]:
        """Return memory in the window, and its start. A ring, because the oldest ends first."""
        need = aligned(message.nbytes)
        while (start := self._free_at(need)) < 0:
            self._finish_oldest()
        return self.memory[start : start + message.nbytes], start

    def _free_at(self, need: int) -> int:
        """Return the position of free memory after the newest part of the ring; -1 if none."""
        staged = [entry for entry in self.pending if entry.start >= 0]
        if not staged:
            return 0
        oldest, newest = staged[0], staged[-1]
        if newest.start >= oldest.start:  # has not wrapped around yet
            if newest.stop + need <= self.window:
                return newest.stop
            return 0 if need <= oldest.start else -1
        return newest.stop if newest.stop + need <= oldest.start else -1

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for the window; untouched pages cost nothing."""
        if self.devices:
            return page_locked(nbytes, next(iter(self.devices)))
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
