"""A save during the training: each rank copies its share, and a thread writes the copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError, RankError
from anyrank.runs.saving.background_channel import open_channel
from anyrank.runs.saving.collect import Snapshot
from anyrank.runs.saving.commit import SaveRecord
from anyrank.runs.saving.rank_file import Item
from anyrank.runs.saving.staging import Staging
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")

FAILED_EXIT_SEC = 10.0  # how long an exception waits for a pending save

Write = Callable[[Snapshot, Ranks], SaveRecord]


class BackgroundSave:
    """At most one pending save. The memory of the copy is reused by the next save."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._staging = Staging()
        self._writers: Ranks | None = None  # the ranks, for the writing thread
        self._thread: threading.Thread | None = None
        self._result: SaveRecord | AnyrankError | None = None
        self._stall_sec = 0.0

    @contextmanager
    def connected(self, ranks: Ranks) -> Generator[None]:
        """Open separate connections between the same ranks for the writing thread. Collective."""
        with open_channel(ranks, "the background save") as self._writers:
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
