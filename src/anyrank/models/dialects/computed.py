"""Tensors whose values are computed while they are read, as if they were the bytes of a file."""

from __future__ import annotations

from typing import Protocol

import torch

from anyrank.files.listing import Computed, Fetch
from anyrank.files.segments import memory_of

ITEM = torch.float32.itemsize
MAX_NUMEL = 1 << 18  # elements that are computed at a time


class Decoded(Computed, Protocol):
    """A float32 tensor whose values are decoded in units of several elements."""

    @property
    def unit(self) -> int:
        """The number of elements that are computed together."""
        ...

    def decode(self, start: int, stop: int, fetch: Fetch) -> torch.Tensor:
        """Return elements [start, stop) in row-major order, in whole units, as float32."""
        ...


class ComputedFile:
    """The float32 values of a decoded tensor, as if they were the bytes of a file."""

    def __init__(self, path: str, computed: Decoded, fetch: Fetch) -> None:
        self.path = path
        self.computed = computed
        self.fetch = fetch

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        """Fill some of the buffers in order, at most as many as are computed at a time."""
        unit, numel = self.computed.unit, self.computed.numel
        end = offset + sum(len(buffer) for buffer in buffers)
        start = offset // ITEM // unit * unit
        most = start + max(unit, MAX_NUMEL // unit * unit)
        stop = min(-(-end // ITEM // unit) * unit, most, numel)
        # It needs a name, because `data` is only a view.
        values = self.computed.decode(start, stop, self.fetch)
        data = memory_of(values)[offset - start * ITEM :]
        done = 0
        for buffer in buffers:
            part = data[done : done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        """Do nothing, because the files belong to their reader."""
