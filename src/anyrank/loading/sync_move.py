"""The bytes of a sync: each rank's sends, receives and copies, side by side in a bounded window.

Every rank works through its own part of one order. It starts the next transfer as soon as the
window has room, and finishes the oldest first, so that reading, sending and placing overlap. The
ranks agree at the end of each round that none has failed; until then a rank that has keeps to the
order, with memory of no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank import faults
from anyrank.files.reader import copy_into, synchronize
from anyrank.loading.sync_planning import Flow, SyncPlan
from anyrank.settings import BUFFER_BYTES
from anyrank.tensors.box import Box
from anyrank.tensors.sync_plan import Strip, Transfer
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Interrupted, Ranks

BLOCK_BYTES = 1 << 20  # of one message; the same on all ranks
ROUND_BYTES = 64 << 20  # of one rank, on average, between two agreements
ALIGN = 64
WHAT = "passing on the weights"


class Places:
    """This rank's memory at both ends.

    Attributes:
        sources: number of a source tensor -> what this rank holds of it.
        targets: position in `dst` -> what this rank has to fill of it.
    """

    def __init__(
        self, sources: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]
    ) -> None:
        self.sources = sources
        self.targets = targets

    def devices(self) -> set[torch.device]:
        """The devices of both ends, without the CPU."""
        every = (*self.sources.values(), *self.targets.values())
        return {tensor.device for tensor in every if not tensor.is_cpu}

    def given(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """The elements of a box as this rank's source holds them, in the order of `dst`."""
        strip = flow.strips[transfer.strip]
        moved = strip.to_source(box).relative_to(strip.to_source(transfer.box).offsets)
        view = self.sources[strip.source][moved.shifted(transfer.source).slices()]
        return _turned(view, strip, box.sizes)

    def taken(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Where this rank's `dst` has the elements of a box."""
        inside = box.relative_to(transfer.box.offsets).shifted(transfer.target)
        return self.targets[flow.index][inside.slices()]


def _turned(view: torch.Tensor, strip: Strip, sizes: Sequence[int]) -> torch.Tensor:
    if strip.dims == tuple(range(view.dim())):
        return view
    order = [dim for dim in strip.dims if dim >= 0]
    rest = [dim for dim in range(view.dim()) if dim not in order]  # of size 1 in the box
    return view.permute(order + rest).reshape(tuple(sizes))


@dataclass(slots=True)
class _Pending:
    """A transfer that is under way.

    Attributes:
        work: gloo's.
        nbytes: of the message.
        finish: what is to be done when the message is there.
        start, stop: its part of the window's memory, if it is staged.
    """

    work: Any
    nbytes: int
    finish: Callable[[], None] | None
    start: int = -1
    stop: int = -1


class Mover:
    """Fills every rank's targets. All ranks, the same plan.

    Attributes:
        sent, received, copied: bytes of this rank.
    """

    def __init__(
        self, plan: SyncPlan, places: Places, ranks: Ranks, sample: Callable[[], None]
    ) -> None:
        self.plan = plan
        self.places = places
        self.ranks = ranks
        self.sample = sample
        self.window = max(4 * BLOCK_BYTES, BUFFER_BYTES.get())
        self.devices = places.devices()
        self.memory = self._allocate()
        self.pending: deque[_Pending] = deque()
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
        for number, flows in enumerate(self._rounds()):
            if number and self.ranks.any(self.problem is not None, WHAT):
                raise self.problem or Interrupted
            self._round(flows)
            self.sample()
        if self.problem is not None:
            raise self.problem

    def _rounds(self) -> Iterator[list[Flow]]:
        """All tensors, in runs of about ROUND_BYTES a rank; the same on all ranks."""
        most = ROUND_BYTES * max(1, self.plan.receivers)
        run: list[Flow] = []
        total = 0
        for flow in self.plan.flows:
            if flow.is_compared:
                continue
            run.append(flow)
            total += flow.nbytes
            if total >= most:
                yield run
                run, total = [], 0
        if run:
            yield run

    def _round(self, flows: Sequence[Flow]) -> None:
        with self.ranks.streaming(WHAT):
            for flow in flows:
                for transfer in flow.transfers:
                    most = BLOCK_BYTES // flow.wire.itemsize
                    for box in transfer.box.cut(most):
                        self._start(flow, transfer, box)
            while self.pending:
                self._finish_oldest()

    def _start(self, flow: Flow, transfer: Transfer, box: Box) -> None:
        rank = self.ranks.rank
        if transfer.sender == transfer.receiver:
            self._try(lambda: self._copy(flow, transfer, box))
        elif transfer.sender == rank:
            self._send(flow, transfer, box)
        else:
            self._receive(flow, transfer, box)

    def _try(self, work: Callable[[], Any]) -> Any:
        """The result of work that may fail; nothing once something has failed on this rank."""
        if self.problem is None:
            try:
                return work()
            except Exception as error:  # the others still wait for this round's messages
                self.problem = error
        return None

    def _copy(self, flow: Flow, transfer: Transfer, box: Box) -> None:
        target = self.places.taken(flow, transfer, box)
        copy_into(target, self.places.given(flow, transfer, box))
        self._settle(target)
        self.copied += box.numel * flow.held.itemsize

    def _settle(self, tensor: torch.Tensor) -> None:
        """Wait for the copies to or from a device, whose other end is used again at once."""
        if not tensor.is_cpu:
            torch.accelerator.current_stream(tensor.device).synchronize()

    def _send(self, flow: Flow, transfer: Transfer, box: Box) -> None:
        nbytes = box.numel * flow.wire.itemsize

        def ready() -> torch.Tensor | None:
            faults.point("sync.send")
            view = self.places.given(flow, transfer, box)
            return view if _is_plain(view, flow.wire) else None

        def stage() -> None:
            view = self.places.given(flow, transfer, box)
            copy_into(memory.view(flow.wire).view(box.sizes), view.to(flow.wire))
            self._settle(view)

        direct: torch.Tensor | None = self._try(ready)
        if direct is not None:
            self._make_room(nbytes)
            work = self.ranks.start_send(_as_bytes(direct), transfer.receiver)
            self._add(_Pending(work, nbytes, None))
        else:
            memory, start, stop = self._stage(nbytes)
            self._try(stage)
            work = self.ranks.start_send(memory, transfer.receiver)
            self._add(_Pending(work, nbytes, None, start, stop))
        self.sent += nbytes

    def _receive(self, flow: Flow, transfer: Transfer, box: Box) -> None:
        nbytes = box.numel * flow.wire.itemsize

        def ready() -> torch.Tensor | None:
            faults.point("sync.receive")
            target = self.places.taken(flow, transfer, box)
            return target if _is_plain(target, flow.wire) else None

        def place() -> None:
            target = self.places.taken(flow, transfer, box)
            copy_into(target, memory.view(flow.wire).view(box.sizes))
            self._settle(target)

        direct: torch.Tensor | None = self._try(ready)
        if direct is not None:
            self._make_room(nbytes)
            work = self.ranks.start_receive(_as_bytes(direct), transfer.sender)
            self._add(_Pending(work, nbytes, None))
        else:
            memory, start, stop = self._stage(nbytes)
            work = self.ranks.start_receive(memory, transfer.sender)
            self._add(_Pending(work, nbytes, place, start, stop))
        self.received += nbytes

    # -- the window ---------------------------------------------------------------------------

    def _add(self, pending: _Pending) -> None:
        self.pending.append(pending)
        self.under_way += pending.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self.pending and self.under_way + nbytes > self.window:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self.pending.popleft()
        oldest.work.wait()
        self.under_way -= oldest.nbytes
        if oldest.finish is not None:
            self._try(oldest.finish)

    def _stage(self, nbytes: int) -> tuple[torch.Tensor, int, int]:
        """Memory of the window, and its bounds: a ring, as the oldest transfer ends first."""
        self._make_room(nbytes)
        while (start := self._free_at(nbytes)) < 0:
            self._finish_oldest()
        stop = start + -(-nbytes // ALIGN) * ALIGN
        return self.memory[start : start + nbytes], start, stop

    def _free_at(self, nbytes: int) -> int:
        """Where the ring has room behind its newest part; -1 if nowhere."""
        staged = [each for each in self.pending if each.start >= 0]
        need = -(-nbytes // ALIGN) * ALIGN
        if not staged:
            return 0
        oldest, newest = staged[0], staged[-1]
        if newest.start >= oldest.start:  # not round the end yet
            if newest.stop + need <= self.window:
                return newest.stop
            return 0 if need <= oldest.start else -1
        return newest.stop if newest.stop + need <= oldest.start else -1

    def _allocate(self) -> torch.Tensor:
        """Memory of the window, if anything is sent or received; untouched pages cost nothing."""
        every = (t for flow in self.plan.flows for t in flow.transfers)
        nbytes = self.window if any(t.sender != t.receiver for t in every) else 0
        if self.devices:
            return page_locked(nbytes, next(iter(self.devices)))
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _is_plain(tensor: torch.Tensor, wire: torch.dtype) -> bool:
    """Whether a message can go from or to the very memory of a tensor."""
    return tensor.is_cpu and tensor.dtype == wire and tensor.is_contiguous()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
