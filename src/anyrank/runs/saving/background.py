"""A save during the training: each rank copies its share, and a thread writes the copy."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError, RankError
from anyrank.files.pages import use_large_pages
from anyrank.files.reader import copy_into
from anyrank.models.digests import check_has_memory
from anyrank.runs.saving.collect import Snapshot
from anyrank.runs.saving.commit import SaveRecord
from anyrank.runs.saving.rank_file import Item
from anyrank.sources.torch_zip import ALIGN
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")

FAILED_EXIT_SEC = 10.0  # how long an exception waits for a pending save

_used: set[tuple[tuple[int, ...], int]] = set()  # ranks, and an open channel between them

Write = Callable[[Snapshot, Ranks], SaveRecord]


class BackgroundSave:
    """At most one pending save. The memory of the copy is reused by the next save."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._staging = _Staging()
        self._writers: Ranks | None = None  # the ranks, for the writing thread
        self._thread: threading.Thread | None = None
        self._result: SaveRecord | AnyrankError | None = None
        self._stall_sec = 0.0

    @contextmanager
    def connected(self, ranks: Ranks) -> Generator[None]:
        """Open separate connections between the same ranks for the writing thread. Collective."""
        with _open_channel(ranks) as self._writers:
            try:
                yield
            finally:
                self._writers = None

    def start(self, snapshot: Snapshot, ranks: Ranks, start: float) -> None:
        """Copy this rank's share, and write it in a thread. Collective, within `connected`.

        Args:
            snapshot: what to save.
            ranks: ranks for the calling thread.
            start: time on the performance counter at which the training stopped.

        Raises:
            AnyrankError: a rank had no memory for the copy, and no save was started.
        """

        def stage() -> list[Item]:
            faults.point("save.stage")
            return self._staging.copy(snapshot.items, ranks)

        staged = replace(snapshot, items=ranks.run("copying the state", stage))
        self._result = None
        self._thread = threading.Thread(
            target=self._run, args=(staged, self._writers), name="anyrank-save"
        )
        self._thread.start()
        self._stall_sec = time.perf_counter() - start

    def _run(self, snapshot: Snapshot, ranks: Ranks) -> None:
        try:
            self._result = self._write(snapshot, ranks)
            return
        except AnyrankError as error:
            self._result = error
        except Exception as error:  # `wait` raises it in the main thread
            self._result = RankError(f"{type(error).__name__}: {error}")
        # The next step raises it too, but there may be none.
        log.error("step %d was not saved: %s", snapshot.manifest.step, self._result)

    @property
    def is_in_flight(self) -> bool:
        """Return True if a save was started that `wait` has not returned yet."""
        return self._thread is not None and self._thread.ident is not None

    @property
    def has_failed(self) -> bool:
        """Return True if a save has ended without a checkpoint."""
        return isinstance(self._result, AnyrankError)

    def wait(self, timeout: float | None = None) -> SaveRecord:
        """Wait for the pending save, and return its record.

        Raises:
            AnyrankError: the save failed, on every rank; or it takes longer than `timeout` seconds,
                and is still pending.
        """
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CheckpointError(f"the background save did not finish within {timeout:.0f} s")
        self._thread = None
        result, self._result = self._result, None
        if isinstance(result, AnyrankError):
            raise result
        assert result is not None
        return replace(result, stall_seconds=self._stall_sec)

    def finish_for_error(self, tell: Callable[[SaveRecord], None]) -> None:
        """Wait briefly for the pending save while an exception passes, which the user must see;
        call `tell` with its record.
        """
        try:
            tell(self.wait(FAILED_EXIT_SEC))
        except Exception as error:  # whatever on_commit raises
            log.error("ignored while another exception ends the run: %s", error)


@contextmanager
def _open_channel(ranks: Ranks) -> Generator[Ranks]:
    """Open connections between the same ranks for another thread, so that its messages do not mix
    with the training's. Collective.
    """
    call = "the background save"
    own_used = {channel for members, channel in _used if members == ranks.ranks}
    used = ranks.reduce(f"opening a channel for {call}", own_used, operator.or_)
    channel = next(n for n in itertools.count(1) if n not in used)
    key = ranks.ranks, channel
    _used.add(key)
    try:
        yield Ranks(ranks.ranks, ranks.rank, call, channel)
    finally:
        _used.discard(key)


class _Staging:
    """Memory for a copy of a rank's share, page-locked for shares on an accelerator; reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._streams: dict[torch.device, torch.Stream] = {}

    def copy(self, items: Sequence[Item], ranks: Ranks) -> list[Item]:
        """Copy every item; return the copies in the same order. The next call overwrites them.

        Raises:
            CheckpointError: a tensor's memory was freed.
            AnyrankError: there is no memory to page-lock.
        """
        devices = {item.source.device for item in items if not item.source.is_cpu}
        self._reserve(sum(_padded_bytes(item) for item in items), devices, ranks)
        for device in devices:
            stream = self._streams.setdefault(device, torch.Stream(device))
            with torch.accelerator.device_index(device.index):  # makes no context on others
                stream.wait_event(torch.accelerator.current_stream(device).record_event())
        copies: list[Item] = []
        position = 0
        for item in items:
            copy_bytes = self._memory[position : position + item.nbytes]
            copy = copy_bytes.view(item.dtype).view(item.box.sizes)
            check_has_memory(item.name, item.source)
            with self._streams.get(item.source.device, nullcontext()):
                copy_into(copy, item.source, non_blocking=True)
            copies.append(replace(item, source=copy))
            position += _padded_bytes(item)
        for device in devices:
            self._streams[device].synchronize()
        return copies

    def _reserve(self, nbytes: int, devices: set[torch.device], ranks: Ranks) -> None:
        """Allocate memory if there is too little, after the old memory is freed."""
        if self._memory.numel() >= nbytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if devices:
            self._memory = page_locked(nbytes, min(devices, key=str))
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            use_large_pages([self._memory], ranks.ranks_on_node)


def _padded_bytes(item: Item) -> int:
    """Return the bytes that a copy of an item takes, with its alignment."""
    return -(-item.nbytes // ALIGN) * ALIGN
