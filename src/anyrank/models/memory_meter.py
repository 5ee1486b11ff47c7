"""Measures the memory of a load or a block: anonymous CPU memory, and device memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch

SAMPLE_SEC = 0.02
PEAK_SAMPLE_SEC = 0.002


def rss_anon() -> int:
    """Return this process's anonymous memory (RssAnon) in bytes; 0 if /proc does not show it.

    ru_maxrss and RSS would also count pages of the page cache that a mapping touches.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class Meter:
    """Peaks above the memory at the start, sampled whenever `sample` is called."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.host_start = rss_anon()
        self.devices: set[torch.device] = set()
        self.device_start = 0
        self.host_peak = self.host_start
        self.device_peak = 0
        self.last = 0.0

    def watch(self, devices: Iterable[torch.device]) -> None:
        """Also measure the memory of these devices from now on; the CPU and meta are ignored."""
        self.devices = {device for device in devices if device.type not in ("cpu", "meta")}
        self.device_start = self.device_peak = _device_bytes(self.devices)

    def sample(self, _: int = 0) -> None:
        """Sample the memory in use, at most every SAMPLE_SEC."""
        now = time.monotonic()
        if now - self.last >= SAMPLE_SEC:
            self.last = now
            self.host_peak = max(self.host_peak, rss_anon())
            self.device_peak = max(self.device_peak, _device_bytes(self.devices))

    def peaks(self) -> tuple[int, int]:
        """Return the highest CPU and device memory above the start, in bytes."""
        self.last = 0.0
        self.sample()
        return self.host_peak - self.host_start, self.device_peak - self.device_start

    def seconds(self) -> float:
        """The seconds since the meter was made."""
        return time.perf_counter() - self.start


class PeakMemory:
    """The peak of RssAnon in a block, above its value at the start, sampled every 2 ms by a thread.

    A peak that is shorter than the sampling interval, or inside a native call that holds the GIL,
    is missed. Pages that malloc kept from earlier use do not count again, so run the measured code
    in a new rank.

    Attributes:
        peak_bytes: the highest increase so far; final after exit.
        seconds: duration of the block, after exit.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.start_bytes = 0
        self.seconds = self.started = 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="peak-memory", daemon=True)

    def watch(self) -> None:
        """Sample until the block ends."""
        while not self.ended.wait(PEAK_SAMPLE_SEC):
            self.sample()

    def sample(self) -> None:
        """Update the peak with the current memory."""
        self.peak_bytes = max(self.peak_bytes, rss_anon() - self.start_bytes)

    def __enter__(self) -> PeakMemory:
        self.start_bytes, self.started = rss_anon(), time.perf_counter()
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.sample()
        self.seconds = time.perf_counter() - self.started
        self.ended.set()
        self.thread.join()


def _device_bytes(devices: Iterable[torch.device]) -> int:
    """Return the memory of tensors on accelerators in bytes; 0 if nothing was allocated yet."""
    return sum(torch.accelerator.memory_allocated(device) for device in devices)
