"""How bytes go to the host and back: at once on the CPU, on streams of their own on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

Event = Any


class Lanes(Protocol):
    """Copies of one device. An event is that of a copy that has begun, None of one that is done."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event: ...

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event: ...

    def wait(self, event: Event) -> None:
        """What is computed from here on sees the copy."""
        ...


class AtOnce:
    """Copies that are done when the call returns."""

    def to_host(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> None:
        target.copy_(source)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> None:
        target.copy_(source)

    def wait(self, event: Event) -> None:
        assert event is None


class Streams:
    """One stream each way, beside whichever stream computes when a copy is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.out: Any = self.module.Stream(device)
        self.back: Any = self.module.Stream(device)

    def to_host(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event:
        return self.copy(self.out, target, source, after)

    def to_device(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event:
        event = self.copy(self.back, target, source, after)
        # It may be dropped before anything waits for the copy.
        target.record_stream(self.back)
        return event

    def copy(
        self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event:
        # Read here, before the switch: the stream that has written the source, and that has used
        # the target's memory before.
        stream.wait_stream(self.module.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with self.module.stream(stream):
            target.copy_(source, non_blocking=True)
            done = self.module.Event()
            done.record(stream)
        return done

    def wait(self, event: Event) -> None:
        if event is not None:
            self.module.current_stream(self.device).wait_event(event)


def lanes_of(device: torch.device) -> Lanes:
    """How a device's tensors travel."""
    return AtOnce() if device.type == "cpu" else Streams(device)
