"""Host memory of a process as the kernel counts it. Linux only.

Anonymous pages only: pages of mapped files belong to the page cache.
"""

from __future__ import annotations

import threading
from types import TracebackType

from anyrank.model.memory_meter import rss_anon

SAMPLE_SECONDS = 0.002


def pss_anon(pid: int | None = None) -> int:
    """Bytes of anonymous memory of a process, a page shared by n processes counted as 1/n.

    Exact, and slow on large processes: the kernel walks every page.

    Args:
        pid: the process; this one when None. Raises OSError when it is gone or not ours.
    """
    return kib_field(f"/proc/{pid or 'self'}/smaps_rollup", b"Pss_Anon:") * 1024


def kib_field(path: str, name: bytes) -> int:
    """The number after `name` in a /proc file of `Name: number kB` lines."""
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    raise OSError(f"{path} has no field {name.decode()}")


class PeakMemory:
    """The peak of RssAnon above its value at entry, sampled every 2 ms by a thread.

    A peak shorter than a sample, or inside a native call that holds the GIL, is missed. Pages that
    malloc kept from an earlier use do not count again: run the subject in a fresh rank.

    Attributes:
        peak_bytes: the highest rise so far; final after exit.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.start_bytes = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="peak-memory", daemon=True)

    def watch(self) -> None:
        """Sample until the block ends."""
        while not self.ended.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Update the peak with the current memory."""
        self.peak_bytes = max(self.peak_bytes, rss_anon() - self.start_bytes)

    def __enter__(self) -> PeakMemory:
        self.start_bytes = rss_anon()
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sample()
        self.ended.set()
        self.thread.join()
