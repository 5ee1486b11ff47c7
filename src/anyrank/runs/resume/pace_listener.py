"""The listener that measures a run's pace; only with several ranks, to find a slow one."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from anyrank.runs.resume.listener import RunListener
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.train_state import TrainState
from anyrank.training.steps.pace import Pace
from anyrank.world.ranks import Ranks


class PaceListener(RunListener):
    """Measures the parts of each step by hooks of the model, from the second step on.

    Args:
        state: state of the run.
        ranks: ranks of the run.
    """

    def __init__(self, state: TrainState, ranks: Ranks) -> None:
        self._state, self._ranks = state, ranks
        self._pace: Pace | None = None
        self._has_begun = False

    def waited_sec(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return 0.0 if self._pace is None else self._pace.waited_sec

    def tell(self, number: int) -> bool:
        """Return True if this rank has measured a full window of steps, which is rarely so."""
        return self._pace is not None and self._pace.has_window

    def join(self, news: Any, others: Any) -> bool:
        return news and others

    def on_step(self, news: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._start()
        elif self._pace is not None and news:
            windows = self._ranks.collect("comparing the pace", self._pace.take_window())
            if windows is not None:
                self._pace.warn_of_slow(self._ranks.ranks, windows)

    def on_save(self) -> None:
        if self._pace is not None:
            self._pace.pause()

    def on_close(self, error: BaseException | None) -> None:
        if self._pace is not None:
            self._pace.close()

    def _start(self) -> None:
        model = self._state.parts.by_name.get("model")
        if isinstance(model, nn.Module):
            if Pace.running is not None:  # that of a watch; only one can run at a time
                Pace.running.close()
            self._pace = Pace(model, [innermost(o) for o in self._state.parts.optimizers()])
            # For a run that is not closed but dropped: otherwise a watch could not start later.
            weakref.finalize(self, self._pace.close).atexit = False
