"""Host buffers that are used again step after step, bounded in bytes."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from anyrank import settings
from anyrank.errors import AnyrankError, RecomputeError
from anyrank.world.pinned import page_locked

POLL_SEC = 0.001


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
    """Buffers of exact sizes. Sizes that nobody asks for any more make room for others.

    Args:
        limit_bytes: most bytes that it holds, used or idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.idle: dict[int, list[Buffer]] = {}
        # Finalizers append here from any place, even from within `take`: no lock, no bookkeeping.
        self.returned: deque[Buffer] = deque()
        self.held_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self.allocated = 0
        self.reused = 0

    def take(self, nbytes: int, device: torch.device) -> Buffer | None:
        """A buffer of this size, for copies from and to the device; None when the pool is full."""
        self.collect()
        fitting = self.idle.get(nbytes)
        if fitting:
            buffer = fitting.pop()
            self.reused += 1
        elif self.used_bytes + nbytes > self.limit_bytes:
            return None
        else:
            self.make_room(nbytes)
            buffer = allocate(nbytes, device)
            self.held_bytes += nbytes
            self.allocated += 1
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def wait_for(self, nbytes: int, device: torch.device) -> Buffer:
        """`take`, once another thread's backward pass has given enough back.

        Raises:
            RecomputeError: nobody did, for ANYRANK_TIMEOUT_SEC seconds.
        """
        seconds = settings.TIMEOUT_SEC.get()
        deadline = time.monotonic() + seconds
        gc.collect()  # graphs in reference circles hold buffers that nobody needs
        while (buffer := self.take(nbytes, device)) is None:
            if time.monotonic() > deadline:
                raise RecomputeError(
                    f"the offload pool of {self.limit_bytes} bytes had no {nbytes} bytes for "
                    f"{seconds} seconds: no backward pass of another thread gave any back; raise "
                    'pool_bytes, or use on_full="keep"'
                )
            time.sleep(POLL_SEC)
        return buffer

    def collect(self) -> None:
        """Book what was returned."""
        while self.returned:
            buffer = self.returned.popleft()
            self.used_bytes -= buffer.nbytes
            self.idle.setdefault(buffer.nbytes, []).append(buffer)

    def make_room(self, nbytes: int) -> None:
        """Free idle buffers until so many bytes may be allocated."""
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
    """Host memory of exactly this size, pinned where a device copies from it by itself."""
    if device.type == "cpu":
        with torch.inference_mode(False):  # a buffer of inference mode could not be used outside
            return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    try:
        return Buffer(page_locked(nbytes, device))
    except AnyrankError as error:
        raise RecomputeError(f"no host memory for offload: {error}; or lower pool_bytes") from error
