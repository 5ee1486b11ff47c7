"""`load_best_model_at_end` of an elastic trainer: the best step stays, and is loaded at the end."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer

import anyrank
from anyrank.integrations.trainer_run import Asked, ElasticRun, Training

log = logging.getLogger("anyrank.integrations")


class BestStep(Trainer):
    """A trainer that saves each step that is the best so far by `metric_for_best_model`."""

    elastic: ElasticRun
    _elastic_asked: Asked
    _elastic_training: Training

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        is_best = super()._determine_best_metric(*args, **kwargs)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True  # also where evaluation alone is due
        return is_best

    def _elastic_note_saved(self) -> None:
        """After a save: if its step is the best so far, it stays, in place of the one before."""
        ckpts, state = self.elastic.checkpoints, self.state
        assert ckpts is not None
        if self.args.load_best_model_at_end and state.best_global_step == state.global_step:
            ckpts.wait()
            self._elastic_set_best(ckpts.stats()[-1].path)

    def _elastic_find_best(self) -> None:
        """After a resume: the best step so far stays, if it is there."""
        ckpts, best = self.elastic.checkpoints, self.state.best_global_step
        assert ckpts is not None
        if not self.args.load_best_model_at_end or best is None:
            return
        path = next((saved.path for saved in ckpts.saved() if saved.step == best), None)
        self._elastic_set_best(path)
        if path is None:
            log.warning(
                "%s: step %d, the best so far, is not there any more: load_best_model_at_end "
                "loads a later one if that is better, else none",
                self.elastic.folder,
                best,
            )

    def _elastic_set_best(self, path: str | None) -> None:
        best, kept = self.state.best_global_step, self._elastic_asked.best
        self.state.best_model_checkpoint = path
        kept.clear()
        kept.update([] if best is None else [best])

    def _load_best_model(self) -> None:
        """Load the weights of the best step, after the last one is saved. All ranks."""
        ckpts, path = self.elastic.checkpoints, self.state.best_model_checkpoint
        assert ckpts is not None
        assert path is not None  # else the Trainer does not call
        ckpts.save()
        ckpts.wait()
        model: Any = self.model_wrapped
        has_base = self._elastic_asked.parts.get("base") is not None  # it was not written
        anyrank.load(model, path, missing="keep" if has_base else "error")
