"""The saves of one process, and the user's function that is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from anyrank.runs.saving.write import SaveRecord
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import is_schedule
from anyrank.runs.state.train_state import TrainState
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


class SaveRecords:
    """The finished saves of a process.

    Args:
        on_commit: as for `Checkpoints`.

    Attributes:
        has_callback: whether this rank has `on_commit`; from the first agreement on, whether any
            rank has.
    """

    def __init__(self, on_commit: Callable[[SaveRecord], object] | None) -> None:
        self.has_callback = on_commit is not None
        self._on_commit = on_commit
        self._schedules: tuple[int, dict[str, Any]] = 0, {}  # those of the step that was saved last

    def add(self, record: SaveRecord, ranks: Ranks) -> None:
        """Record a finished save, and call `on_commit`. All ranks."""
        self._note(record, ranks)
        if self.has_callback:
            ranks.run("calling on_commit", lambda: self._call_back(record, ranks))

    def add_alone(self, record: SaveRecord, ranks: Ranks) -> None:
        """Record a finished save without the other ranks, which may have failed."""
        self._note(record, ranks)
        self._call_back(record, ranks)

    def _note(self, record: SaveRecord, ranks: Ranks) -> None:
        if ranks.index == 0:
            log.info("saved step %d: %s", record.step, record.path)

    def _call_back(self, record: SaveRecord, ranks: Ranks) -> None:
        if self._on_commit is not None and ranks.index == 0:
            self._on_commit(record)

    def note_schedules(self, state: TrainState) -> None:
        """Remember the schedules of the step that is being saved."""
        self._schedules = state.step, _schedules_of(state)

    def warn_of_saved(self, path: str, state: TrainState, *, always: bool) -> None:
        """Warn that a step is left as it is: if `always`, or if a schedule has stepped since."""
        now, (step, before) = _schedules_of(state), self._schedules
        known = before.keys() & now.keys() if step == state.step else set[str]()
        changed = [name for name in known if now[name] != before[name]]
        if changed:
            log.warning(
                "%s: step %d is saved already, without what %s has done since: a resume of it goes "
                "on without that: call step_done() after the schedule's step, for an epoch's in "
                "the step that step.ends_epoch names",
                path,
                state.step,
                ", ".join(sorted(changed)),
            )
        elif always:
            log.warning(
                "%s: step %d is saved already, and a step is saved once: later changes are saved "
                "with the next step",
                path,
                state.step,
            )


def _schedules_of(state: TrainState) -> dict[str, Any]:
    """The states of a run's schedules, by part."""
    parts = state.parts.parts.items()
    return {name: as_json(part.state_dict()) for name, part in parts if is_schedule(part)}
