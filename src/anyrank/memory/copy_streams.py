"""How bytes go to the host and back: at once on the CPU, on streams of their own on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

Event = torch.Event | None


class CopyStreams(Protocol):
    """Copies of one device. An event is that of a copy that has begun, None of one that is done."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event: ...

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event: ...

    def wait(self, event: Event) -> None:
        """What is computed from here on sees the copy."""
        ...


class SyncCopy:
    """Copies that are done when the call returns."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> None:
        target.copy_(source)

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> None:
        target.copy_(source)

    def wait(self, event: Event) -> None:
        assert event is None


class Streams:
    """One stream each way, beside whichever stream computes when a copy is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out = torch.Stream(device)
        self.back = torch.Stream(device)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event:
        event = self.copy(self.out, target, source, after)
        # Memory of another stream than the one that waits for the copy: it may be used again there
        # when that wait is over. For memory of this stream the wait is enough, and this is nothing.
        source.record_stream(torch.accelerator.current_stream(self.device))
        return event

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[torch.Event]
    ) -> Event:
        event = self.copy(self.back, target, source, after)
        # It may be dropped before anything waits for the copy.
        target.record_stream(self.back)
        return event

    def copy(
        self,
        stream: torch.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[torch.Event],
    ) -> Event:
        # Read here, before the switch: the stream that has written the source, and that has used
        # the target's memory before.
        current = torch.accelerator.current_stream(self.device)
        with torch.accelerator.device_index(self.device.index):
            stream.wait_stream(current)
            for event in after:
                stream.wait_event(event)
            with stream:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, event: Event) -> None:
        if event is not None:
            with torch.accelerator.device_index(self.device.index):
                torch.accelerator.current_stream(self.device).wait_event(event)


def copy_streams_of(device: torch.device) -> CopyStreams:
    """How a device's tensors travel."""
    return SyncCopy() if device.type == "cpu" else Streams(device)
