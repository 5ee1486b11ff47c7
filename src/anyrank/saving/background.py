"""A save during the training: the copy under the next forward and backward, then the files.

Parameters and optimizer state change in `optimizer.step` alone, so their copy may run while the
next gradients are computed; only the optimizer waits for it. Everything else is copied at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError, RankError
from anyrank.saving.rank_file import (
    Item,
    Staging,
    check_unwritten,
    devices_of,
    written_while_copied,
)
from anyrank.saving.save import SaveRecord, Snapshot
from anyrank.state.digests import start_digests
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")

Write = Callable[[Snapshot, Ranks], SaveRecord]


class Background:
    """At most one save in flight. Its memory, one share, is reused from save to save."""

    def __init__(self, write: Write) -> None:
        self.write = write
        self.now, self.later = Staging(), Staging()
        # Apart from the training's streams, which wait for `copied` before the state changes.
        self.streams: dict[torch.device, torch.Stream] = {}
        self.copied: dict[torch.device, torch.Event] = {}
        self.unchecked: list[Item] = []  # whose copy may not have ended
        self.checking = threading.Lock()
        self.spoiled: CheckpointError | None = None
        self.thread: threading.Thread | None = None
        self.staged = threading.Event()
        self.staged.set()
        self.failure: AnyrankError | None = None
        self.record: SaveRecord | None = None
        self.stall = 0.0
        self.hooks: list[Any] = []
        self.watched: list[Optimizer] = []

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers wait for a copy that is under way before they step."""
        inner = [innermost(optimizer) for optimizer in optimizers]
        if [id(optimizer) for optimizer in inner] != [id(optimizer) for optimizer in self.watched]:
            self.close()
            self.watched = inner
            self.hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())
                for optimizer in inner
            ]

    def start(self, snapshot: Snapshot, ranks: Ranks, writers: Ranks) -> None:
        """Copy what may change any time, and go on with the rest in a thread. All ranks.

        Args:
            snapshot: what to save.
            ranks: for this thread.
            writers: the same ranks, for the other thread.

        Raises:
            AnyrankError: a rank had no memory for the copy; nothing was started.
        """
        mutable = [item for item in snapshot.items if not item.steady]
        steady = [item for item in snapshot.items if item.steady]

        def copy() -> tuple[list[Item], Callable[[], list[int]]]:
            copied = self.now.take(mutable, ranks)
            return copied, start_digests([(i.name, i.source) for i in steady], ranks.check)

        copied, before = ranks.own("copying the state", copy)
        self.failure = self.record = self.spoiled = None
        self.stall = 0.0
        self.staged.clear()
        args = (snapshot, copied, steady, before, _written_by_now(steady), writers)
        self.thread = threading.Thread(target=self._run, args=args, name="anyrank-save")
        self.thread.start()

    def _run(
        self,
        snapshot: Snapshot,
        copied: list[Item],
        steady: list[Item],
        before: Callable[[], list[int]],
        written: dict[torch.device, torch.Event],
        ranks: Ranks,
    ) -> None:

        def stage() -> list[Item]:
            faults.point("save.stage")
            for device, event in written.items():
                if device not in self.streams:
                    self.streams[device] = torch.Stream(device)
                torch.accelerator.set_stream(self.streams[device])
                self.streams[device].wait_event(event)
            streams = {device: self.streams[device] for device in written}
            try:
                copies = self.later.begin(steady, ranks)
                # Of the same values as the copies: a device takes them before the optimizer steps.
                same = [
                    (item.name, copy.source if item.source.is_cpu else item.source)
                    for item, copy in zip(steady, copies, strict=True)
                ]
                after = start_digests(same, ranks.check)
                compare_later = snapshot.replicas.start(ranks)
                self.unchecked = [item for item in steady if item.source.device in streams]
                self.copied = {device: stream.record_event() for device, stream in streams.items()}
                self.staged.set()
            finally:
                for stream in streams.values():
                    stream.synchronize()
            self._check()
            self.copied = {}
            if self.spoiled is not None:
                raise self.spoiled
            _refuse_written(steady, before(), after())
            compare_later()
            return copies

        try:
            try:
                copies = ranks.own("staging the checkpoint", stage)
            finally:
                self.staged.set()
            self.record = self.write(replace(snapshot, items=[*copied, *copies]), ranks)
        except AnyrankError as error:
            self.failure = error
        except Exception as error:  # a thread must hand on whatever happens in it
            self.failure = RankError(f"{type(error).__name__}: {error}")
        if self.failure is not None:  # raised at the next step as well, but there may be none
            log.error("step %d was not saved: %s", snapshot.manifest.step, self.failure)

    def wait_for_copy(self) -> None:
        """Return when the state may change again, by what is asked of the current stream."""
        if not self.staged.is_set():
            start = time.perf_counter()
            self.staged.wait()
            self.stall += time.perf_counter() - start
        self._check()
        for device, event in self.copied.items():
            with torch.accelerator.device_index(device.index):
                torch.accelerator.current_stream(device).wait_event(event)

    def _check(self) -> None:
        """Look for writes to what was being copied: before the optimizer's, or at its end."""
        with self.checking:  # the optimizer goes on when the check is over, whoever makes it
            items, self.unchecked = self.unchecked, []
            try:
                for item in items:
                    check_unwritten(item)
            except CheckpointError as error:
                self.spoiled = error

    @property
    def is_started(self) -> bool:
        """Whether there is a save to be waited for."""
        return self.thread is not None and self.thread.ident is not None

    @property
    def failed(self) -> bool:
        """Whether a save has ended without a checkpoint."""
        return self.failure is not None

    def wait(self, timeout: float | None = None) -> SaveRecord:
        """The save that was started, once it is finished.

        Raises:
            AnyrankError: it failed, on all ranks alike; or took longer than `timeout` seconds.
        """
        assert self.thread is not None
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise CheckpointError(f"the save in flight is not finished after {timeout:.0f} s")
        self.thread = None
        failure, record = self.failure, self.record
        self.failure = self.record = None
        if failure is not None:
            raise failure
        assert record is not None
        return replace(record, stall_seconds=self.stall)

    def close(self) -> None:
        """Forget the optimizers."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.watched = [], []


def _refuse_written(items: Sequence[Item], before: Sequence[int], copied: Sequence[int]) -> None:
    """Refuse copies of anything but the values that the items had when the save began.

    torch does not count writes through `.data`, `.detach()` or numpy, so digests are compared: of
    a CPU tensor with its copy's, of a device's with those that it has after the copy.

    Raises:
        CheckpointError: names the first.
    """
    for item, was, found in zip(items, before, copied, strict=True):
        if was != found:
            raise written_while_copied(item)


def _written_by_now(items: Sequence[Item]) -> dict[torch.device, torch.Event]:
    """For each accelerator, what the calling thread has asked it to do up to now, as an event."""
    events: dict[torch.device, torch.Event] = {}
    for device in devices_of(items):
        with torch.accelerator.device_index(device.index):  # no context on the current one
            events[device] = torch.accelerator.current_stream(device).record_event()
    return events


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers that look like one."""
    inner: Any = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer
