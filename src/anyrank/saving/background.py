"""A save during the training: a copy of the share at the step's end, and the files behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError, RankError
from anyrank.saving.collect import Snapshot
from anyrank.saving.rank_file import Item, Staging
from anyrank.saving.write import SaveRecord
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")

Write = Callable[[Snapshot, Ranks], SaveRecord]


class Background:
    """At most one save in flight. Its memory, one share, is reused from save to save."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._result: SaveRecord | AnyrankError | None = None
        self._stall = 0.0

    def start(self, snapshot: Snapshot, ranks: Ranks, writers: Ranks, start: float) -> None:
        """Copy this rank's share, and write it in a thread. All ranks.

        Args:
            snapshot: what to save.
            ranks: for this thread.
            writers: the same ranks, for the other thread.
            start: when the training began to wait, on the performance counter.

        Raises:
            AnyrankError: a rank had no memory for the copy; nothing was started.
        """

        def copy() -> list[Item]:
            faults.point("save.stage")
            return self._staging.take(snapshot.items, ranks)

        copied = replace(snapshot, items=ranks.own("copying the state", copy))
        self._result = None
        self._thread = threading.Thread(
            target=self._run, args=(copied, writers), name="anyrank-save"
        )
        self._thread.start()
        self._stall = time.perf_counter() - start

    def _run(self, snapshot: Snapshot, ranks: Ranks) -> None:
        try:
            self._result = self._write(snapshot, ranks)
            return
        except AnyrankError as error:
            self._result = error
        except Exception as error:  # a thread must hand on whatever happens in it
            self._result = RankError(f"{type(error).__name__}: {error}")
        # Raised at the next step as well, but there may be none.
        log.error("step %d was not saved: %s", snapshot.manifest.step, self._result)

    @property
    def is_in_flight(self) -> bool:
        """Whether there is a save to be waited for."""
        return self._thread is not None and self._thread.ident is not None

    @property
    def failed(self) -> bool:
        """Whether a save has ended without a checkpoint."""
        return isinstance(self._result, AnyrankError)

    def wait(self, timeout: float | None = None) -> SaveRecord:
        """The save that was started, once it is finished.

        Raises:
            AnyrankError: it failed, on all ranks alike; or takes longer than `timeout` seconds,
                and is in flight still.
        """
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CheckpointError(f"the save in flight is not finished after {timeout:.0f} s")
        self._thread = None
        result, self._result = self._result, None
        if isinstance(result, AnyrankError):
            raise result
        assert result is not None
        return replace(result, stall_seconds=self._stall)
