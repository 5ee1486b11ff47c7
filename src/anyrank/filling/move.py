"""The bytes of a load or a sync: each rank's sends, receives and copies, in a bounded window.

Every rank works through its own part of one order. It starts the next message as soon as the
window has room, and finishes the oldest first, so that reading, sending and placing overlap. What
follows one another between two ranks shares a message, whose place in the order is that of its
first block. The ranks agree at the end of each round that none has failed; until then a rank that
has keeps to the order, with memory of no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from anyrank import faults
from anyrank.files.reader import copy_into, synchronize
from anyrank.filling.flows import Flow
from anyrank.filling.merge import Adapters
from anyrank.tensors.box import Box
from anyrank.tensors.transfers import Strip, Transfer
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Interrupted, Ranks

MESSAGE_BYTES = 1 << 20  # at most; the same on all ranks
ALIGN = 16  # of messages in the window, and of blocks in a message
DIMS = tuple(range(64))  # as many as a tensor may have
WHAT = "passing on the weights"

T = TypeVar("T")
Side = Callable[[Flow, Transfer, Box], torch.Tensor]


class LocalMemory:
    """This rank's memory of a source and of the model that is filled.

    Attributes:
        sources: number of a source tensor -> what this rank holds of it.
        targets: position in `dst` -> what this rank has to fill of it.
        adapters: what is added to sources while they are read.
    """

    def __init__(
        self,
        sources: Mapping[int, torch.Tensor],
        targets: Mapping[int, torch.Tensor],
        adapters: Adapters | None = None,
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.adapters = adapters or Adapters({}, {})

    def begin(self, flows: Sequence[Flow]) -> None:
        """Make ready what this rank gives in a round."""

    def devices(self) -> set[torch.device]:
        """The devices of both, without the CPU."""
        tensors = (*self.sources.values(), *self.targets.values())
        return {tensor.device for tensor in tensors if not tensor.is_cpu}

    def source_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """The elements of a box as this rank's source holds them, in the order of `dst`."""
        strip = flow.strips[transfer.strip]
        memory = self.sources[strip.source]
        is_plain = strip.source not in self.adapters.added
        if is_plain and memory.shape == box.sizes and strip.dims == DIMS[: memory.dim()]:
            return memory  # all of it
        inside = strip.to_source(box)
        moved = inside.relative_to(strip.to_source(transfer.box).offsets)
        view = memory[moved.shifted(transfer.source).slices()]
        if not is_plain:
            view = self.adapters.add_to(view, strip.source, inside)
        return _turned(view, strip, box.sizes)

    def is_computed(self, flow: Flow, transfer: Transfer) -> bool:
        """Whether `source_view` makes the values, so that nothing holds them."""
        return flow.strips[transfer.strip].source in self.adapters.added

    def is_one_copy(self, flow: Flow, transfer: Transfer) -> bool:
        """Whether what this rank gives itself needs no memory beside the two ends, however large.

        What is computed would be as large as the transfer, and so would be the temporary that a
        cast or a strided side takes between two devices.
        """
        source = self.sources.get(flow.strips[transfer.strip].source)
        if source is None or self.is_computed(flow, transfer):
            return False
        return source.device == self._target(flow).device

    def settle(self) -> None:
        """Wait until the devices have come to the copies under way."""
        for device in self.devices():
            torch.accelerator.current_stream(device).synchronize()

    def _target(self, flow: Flow) -> torch.Tensor:
        return self.targets[flow.index] if flow.twin < 0 else self.sources[flow.twin]

    def target_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Where this rank's `dst` has the elements of a box."""
        into = self._target(flow)
        if into.shape == box.sizes:
            return into  # all of it
        return into[box.relative_to(transfer.box.offsets).shifted(transfer.target).slices()]


def _turned(view: torch.Tensor, strip: Strip, sizes: Sequence[int]) -> torch.Tensor:
    if strip.dims == DIMS[: view.dim()]:
        return view
    order = [dim for dim in strip.dims if dim >= 0]
    rest = [dim for dim in range(view.dim()) if dim not in order]  # of size 1 in the box
    return view.permute(order + rest).reshape(tuple(sizes))


@dataclass(frozen=True, slots=True)
class _Block:
    """A box of one transfer, and where it lies in its message, in bytes."""

    flow: Flow
    transfer: Transfer
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.flow.wire_dtype.itemsize


@dataclass(slots=True)
class _Message:
    """Blocks that follow one another between two ranks; or one that a rank copies for itself.

    Attributes:
        sender, receiver: global ranks.
        blocks: in their order.
        nbytes: of all of them, with the gaps that align them.
        work: waits for its end, once the message is under way.
        start, stop: its part of the window's memory, if it is staged.
    """

    sender: int
    receiver: int
    blocks: list[_Block]
    nbytes: int = 0
    work: Any = None
    start: int = -1
    stop: int = -1


def _messages(
    flows: Sequence[Flow], most_bytes: int, is_one_copy: Callable[[Flow, Transfer], bool]
) -> list[_Message]:
    """A rank's messages in their order, of at most so many bytes each; the same at both ends."""
    messages: list[_Message] = []
    opened: dict[tuple[int, int], _Message] = {}
    for flow in flows:
        most = most_bytes // flow.wire_dtype.itemsize
        for transfer in flow.transfers:
            pair = (transfer.sender, transfer.receiver)
            if pair[0] == pair[1] and is_one_copy(flow, transfer):
                messages.append(_Message(*pair, [_Block(flow, transfer, transfer.box, 0)]))
                continue
            for box in transfer.box.cut(most):
                nbytes = box.numel * flow.wire_dtype.itemsize
                message = opened.get(pair)
                offset = 0 if message is None else _aligned(message.nbytes)
                if message is None or offset + nbytes > most_bytes:
                    message, offset = _Message(*pair, []), 0
                    messages.append(message)
                    opened[pair] = message
                message.blocks.append(_Block(flow, transfer, box, offset))
                message.nbytes = offset + nbytes
    return messages


def window_for(buffer_bytes: int) -> int:
    """Bytes of a window that has room for a few of the longest messages."""
    return max(4 * MESSAGE_BYTES, buffer_bytes)


def _aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN


class Mover:
    """Fills every rank's targets. All ranks, the same rounds.

    Args:
        rounds: flows with this rank's transfers; ranks agree between two rounds that none failed.
        places: this rank's memory.
        ranks: of the call.
        window_bytes: of messages that are under way; 0 where this rank sends and receives nothing.
        sample: called now and then, to measure memory.

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
        self.window = window_bytes
        self.message_bytes = min(MESSAGE_BYTES, window_bytes // 4 or MESSAGE_BYTES)
        self.devices = places.devices()
        self.memory = self._allocate()
        self.pending: deque[_Message] = deque()
        self.under_way = 0
        self.problem: Exception | None = None
        self.sent = self.received = self.copied = 0

    def run(self) -> None:
        """Move everything. What fails in the last round is agreed on by the caller.

        Raises:
            Interrupted: another rank failed.
            Exception: whatever failed on this rank.
        """
        for device in self.devices:  # the caller's streams may still use what is moved
            synchronize(device)
        for number, flows in enumerate(self.rounds):
            if number and self.ranks.any(self.problem is not None, WHAT):
                raise self.problem or Interrupted
            self._round(flows)
            self.sample()
        self._try(self.places.settle)
        if self.problem is not None:
            raise self.problem

    def _round(self, flows: Sequence[Flow]) -> None:
        rank = self.ranks.rank
        self._try(lambda: self.places.begin(flows))
        with self.ranks.streaming(WHAT):
            for message in _messages(flows, self.message_bytes, self.places.is_one_copy):
                if message.sender == message.receiver:
                    self._try(lambda m=message: self._copy(m))
                elif message.sender == rank:
                    self._send(message)
                else:
                    self._receive(message)
            while self.pending:
                self._finish_oldest()

    def _try(self, work: Callable[[], T]) -> T | None:
        """The result of work that may fail; nothing once something has failed on this rank."""
        if self.problem is None:
            try:
                return work()
            except Exception as error:  # the others still wait for this round's messages
                self.problem = error
        return None

    def _copy(self, message: _Message) -> None:
        for block in message.blocks:
            target = self.places.target_view(block.flow, block.transfer, block.box)
            copy_into(target, self.places.source_view(block.flow, block.transfer, block.box))
            self.copied += block.box.numel * block.flow.target_dtype.itemsize

    def _send(self, message: _Message) -> None:
        self._make_room(message.nbytes)  # a lost connection is no error of this rank's own
        self._try(lambda: faults.point("sync.send"))
        memory = self._try(lambda: self._direct(message, self.places.source_view))
        if memory is None:
            memory = self._stage(message)
            self._try(lambda: self._fill(message, memory))
        message.work = self.ranks.start_send(memory, message.receiver)
        self._add(message)
        self.sent += sum(block.nbytes for block in message.blocks)

    def _receive(self, message: _Message) -> None:
        self._make_room(message.nbytes)
        self._try(lambda: faults.point("sync.receive"))
        memory = self._try(lambda: self._direct(message, self.places.target_view))
        if memory is None:
            memory = self._stage(message)
        message.work = self.ranks.start_receive(memory, message.sender)
        self._add(message)
        self.received += sum(block.nbytes for block in message.blocks)

    def _direct(self, message: _Message, side: Side) -> torch.Tensor | None:
        """The very memory of the tensor that a message goes from or to, where it can."""
        first, *others = message.blocks
        if others or (
            side == self.places.source_view and self.places.is_computed(first.flow, first.transfer)
        ):
            return None
        view = side(first.flow, first.transfer, first.box)
        if not view.is_cpu or view.dtype != first.flow.wire_dtype or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8)

    def _fill(self, message: _Message, memory: torch.Tensor) -> None:
        """Read what is sent into the window."""
        for block, staged in _staged(message, memory):
            view = self.places.source_view(block.flow, block.transfer, block.box)
            copy_into(staged, view.to(block.flow.wire_dtype))
            _settle(view)

    def _empty(self, message: _Message, memory: torch.Tensor) -> None:
        """Put what was received in place."""
        for block, staged in _staged(message, memory):
            target = self.places.target_view(block.flow, block.transfer, block.box)
            copy_into(target, staged)
            _settle(target)

    # -- the window ---------------------------------------------------------------------------

    def _add(self, message: _Message) -> None:
        self.pending.append(message)
        self.under_way += message.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self.pending and self.under_way + nbytes > self.window:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self.pending.popleft()
        oldest.work()
        self.under_way -= oldest.nbytes
        if oldest.receiver == self.ranks.rank and oldest.start >= 0:
            memory = self.memory[oldest.start : oldest.start + oldest.nbytes]
            self._try(lambda: self._empty(oldest, memory))

    def _stage(self, message: _Message) -> torch.Tensor:
        """Memory of the window: a ring, as the oldest message ends first."""
        need = _aligned(message.nbytes)
        while (start := self._free_at(need)) < 0:
            self._finish_oldest()
        message.start, message.stop = start, start + need
        return self.memory[start : start + message.nbytes]

    def _free_at(self, need: int) -> int:
        """Where the ring has room after its newest part; -1 if nowhere."""
        staged = [message for message in self.pending if message.start >= 0]
        if not staged:
            return 0
        oldest, newest = staged[0], staged[-1]
        if newest.start >= oldest.start:  # not round the end yet
            if newest.stop + need <= self.window:
                return newest.stop
            return 0 if need <= oldest.start else -1
        return newest.stop if newest.stop + need <= oldest.start else -1

    def _allocate(self) -> torch.Tensor:
        """Memory of the window; untouched pages cost nothing."""
        if self.devices:
            return page_locked(self.window, next(iter(self.devices)))
        return torch.empty(self.window, dtype=torch.uint8, device="cpu")


def _staged(message: _Message, memory: torch.Tensor) -> Iterator[tuple[_Block, torch.Tensor]]:
    """The blocks of a message, each with its part of the window's memory."""
    for block in message.blocks:
        part = memory[block.offset : block.offset + block.nbytes]
        yield block, part.view(block.flow.wire_dtype).view(block.box.sizes)


def _settle(tensor: torch.Tensor) -> None:
    """Wait for the copies to or from a device, whose other end is used again at once."""
    if not tensor.is_cpu:
        torch.accelerator.current_stream(tensor.device).synchronize()
