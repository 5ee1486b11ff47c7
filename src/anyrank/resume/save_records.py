"""The saves of one process, and the function of the user's that is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from anyrank.saving.write import SaveRecord
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


class SaveRecords:
    """The finished saves of a process.

    Args:
        on_commit: as for `Checkpoints`.

    Attributes:
        records: in order.
        has_callback: whether this rank has `on_commit`; then, from the first agreement on, whether
            any rank has.
    """

    def __init__(self, on_commit: Callable[[SaveRecord], object] | None) -> None:
        self.records: list[SaveRecord] = []
        self.has_callback = on_commit is not None
        self._on_commit = on_commit

    def add(self, record: SaveRecord, ranks: Ranks) -> None:
        """Record a finished save, and call `on_commit`. All ranks."""
        self._note(record, ranks)
        if self.has_callback:
            ranks.together("calling on_commit", lambda: self._call_back(record, ranks))

    def add_alone(self, record: SaveRecord, ranks: Ranks) -> None:
        """The same without the other ranks, which may have failed."""
        self._note(record, ranks)
        self._call_back(record, ranks)

    def _note(self, record: SaveRecord, ranks: Ranks) -> None:
        self.records.append(record)
        if ranks.index == 0:
            log.info("saved step %d: %s", record.step, record.path)

    def _call_back(self, record: SaveRecord, ranks: Ranks) -> None:
        if self._on_commit is not None and ranks.index == 0:
            self._on_commit(record)


def warn_of_saved(path: str, step: int) -> None:
    """Warn that a step is left as it is."""
    log.warning(
        "%s: step %d is saved already, and a step is saved once: later changes are saved with the "
        "next step",
        path,
        step,
    )
