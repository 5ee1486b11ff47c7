"""The saves of one process, and the user's function that is called for each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from anyrank.runs.resume.loop import StepCounter
from anyrank.runs.saving.commit import SaveRecord
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import is_schedule
from anyrank.runs.state.train_state import TrainState
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


class SaveRecords:
    """The finished saves of a process.

    Args:
        path, on_commit: as for `Checkpoints`.

    Attributes:
        has_callback: whether this rank has `on_commit`; after the first agreement, whether any
            rank has.
    """

    def __init__(self, path: str, on_commit: Callable[[SaveRecord], object] | None) -> None:
        self._path = path
        self.has_callback = on_commit is not None
        self._on_commit = on_commit
        self._schedules: tuple[int, dict[str, Any]] = 0, {}  # at the step that was saved last

    def add(self, record: SaveRecord, ranks: Ranks) -> None:
        """Record a finished save, and call `on_commit`. Collective."""
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
        """Remember the schedulers' states at the step that is saved."""
        self._schedules = state.step, _schedules_of(state)

    def warn_about_saved(self, state: TrainState, counter: StepCounter, *, always: bool) -> None:
        """Warn that a step is not saved again: if `always`, if an optimizer's step was not counted,
        or if a scheduler has stepped since.
        """
        now, (step, before) = _schedules_of(state), self._schedules
        known = before.keys() & now.keys() if step == state.step else set[str]()
        changed = [name for name in known if now[name] != before[name]]
        if counter.has_uncounted_step:
            log.warning(
                "%s: step %d is already saved, so this call saved nothing: an optimizer has "
                "stepped since then, but that step was not counted. Call step_done() after each "
                "optimizer step, before save().",
                self._path,
                state.step,
            )
        elif changed:
            log.warning(
                "%s: step %d is already saved, but %s stepped since then, and a resume would lose "
                "that. Step the scheduler before step_done(); for a per-epoch scheduler, do so "
                "when step.ends_epoch is true.",
                self._path,
                state.step,
                ", ".join(sorted(changed)),
            )
        elif always:
            log.warning(
                "%s: step %d is already saved, and a step is saved only once; later changes go "
                "into the next save",
                self._path,
                state.step,
            )


def _schedules_of(state: TrainState) -> dict[str, Any]:
    """Return the states of a run's schedulers, by part."""
    parts = state.parts.by_name.items()
    return {name: as_json(part.state_dict()) for name, part in parts if is_schedule(part)}
