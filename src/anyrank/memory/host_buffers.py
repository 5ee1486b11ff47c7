"""Host memory of an offload: a bounded pool of buffers, and the copies to and from them.

Copies are synchronous on the CPU. A device uses one stream for each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.errors import AnyrankError
from anyrank.world.pinned import page_locked


@dataclass
class Buffer:
    """One piece of host memory.

    Attributes:
        data: uint8[nbytes].
        busy: event of the last copy that reads or writes it; the next writer waits for it.
    """

    data: torch.Tensor
    busy: Any = None

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class HostPool:
    """Buffers of exact sizes; idle ones of one size are freed to make room for other sizes.

    Args:
        limit_bytes: limit for all buffers, in use or idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.idle: dict[int, list[Buffer]] = {}
        # Finalizers append at any time, even during `take`, so a lock here could deadlock.
        self.returned: deque[Buffer] = deque()
        self.held_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int, device: torch.device) -> Buffer | None:
        """Return a buffer of this size for copies with the device; None if the pool is full."""
        self.collect()
        idle = self.idle.get(nbytes)
        if idle:
            buffer = idle.pop()
        elif self.used_bytes + nbytes > self.limit_bytes:
            return None
        else:
            self.make_room(nbytes)
            buffer = allocate(nbytes, device)
            self.held_bytes += nbytes
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def collect(self) -> None:
        """Mark the buffers that finalizers have returned as idle."""
        while self.returned:
            buffer = self.returned.popleft()
            self.used_bytes -= buffer.nbytes
            self.idle.setdefault(buffer.nbytes, []).append(buffer)

    def make_room(self, nbytes: int) -> None:
        """Free idle buffers until `nbytes` can be allocated within the limit."""
        for size in sorted(self.idle, reverse=True):
            while self.idle[size] and self.held_bytes + nbytes > self.limit_bytes:
                self.drop(self.idle[size].pop())
        self.idle = {size: buffers for size, buffers in self.idle.items() if buffers}

    def close(self) -> None:
        """Free all idle buffers."""
        self.collect()
        for buffers in self.idle.values():
            for buffer in buffers:
                self.drop(buffer)
        self.idle = {}

    def drop(self, buffer: Buffer) -> None:
        if buffer.busy is not None:
            buffer.busy.synchronize()
        self.held_bytes -= buffer.nbytes


def allocate(nbytes: int, device: torch.device) -> Buffer:
    """Allocate host memory of exactly this size, page-locked for a device.

    Raises:
        MemoryError: the system has too little memory, or too little that can be page-locked.
    """
    if device.type == "cpu":
        with torch.inference_mode(False):  # an inference tensor cannot be used outside of the mode
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    try:
        return Buffer(page_locked(nbytes, device))
    except AnyrankError as error:
        raise MemoryError(
            f"cannot allocate host memory for the offload ({error}). Another way is to lower "
            "pool_bytes"
        ) from error


Event = torch.Event | None
Stream = torch.Stream | None


class CopyEngine:
    """The copies of one device, on one stream per direction, besides the computing stream.

    A copy returns an event. On the CPU a copy is complete when the call returns, without an event.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        if not self.is_cpu:
            self.out = torch.Stream(device)
            self.back = torch.Stream(device)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event:
        if self.is_cpu:
            target.copy_(source)
            return None
        event = self.copy(self.out, target, source, after)
        # If the memory belongs to a stream other than the one that waits for the copy, the
        # allocator may hand it out before the copy has read it. For memory of the waiting stream,
        # the usual case, this call does nothing.
        source.record_stream(torch.accelerator.current_stream(self.device))
        return event

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event:
        if self.is_cpu:
            target.copy_(source)
            return None
        # No `record_stream(self.back)`: torch would hold the memory until the device reaches the
        # copy, but the host runs far ahead of it. Users of the target wait for the copy, and so
        # does the code that drops it unused.
        return self.copy(self.back, target, source, after)

    def copy(
        self,
        stream: torch.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[torch.Event],
    ) -> Event:
        # Read before the switch, because this stream has written the source and used the target's
        # memory.
        current = torch.accelerator.current_stream(self.device)
        with torch.accelerator.device_index(self.device.index):
            stream.wait_stream(current)
            for event in after:
                stream.wait_event(event)
            with stream:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def stream(self) -> Stream:
        """Return the current computing stream; None on the CPU."""
        return None if self.is_cpu else torch.accelerator.current_stream(self.device)

    def wait(self, event: Event, stream: Stream = None) -> None:
        """Let a stream, by default the computing stream, wait for the copy."""
        if event is not None:
            with torch.accelerator.device_index(self.device.index):
                (stream or torch.accelerator.current_stream(self.device)).wait_event(event)
