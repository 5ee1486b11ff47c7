"""The run of an elastic trainer, and what the Trainer counts and logs as a part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import ExportableState

import anyrank

# Of this process; the path follows from best_global_step.
NOT_SAVED = ("is_local_process_zero", "is_world_process_zero", "best_model_checkpoint")


@dataclass
class ElasticRun:
    """The run of an elastic trainer, as its attribute `elastic`.

    Attributes:
        folder: of the run.
        loader: the `ElasticLoader` of the last `train()`; None before.
        checkpoints: its `Checkpoints`; None before.
        report: the `ResumeReport` of the last `train()`; None if it started anew.
    """

    folder: str
    loader: anyrank.ElasticLoader | None = None
    checkpoints: anyrank.Checkpoints | None = None
    report: anyrank.ResumeReport | None = None


@dataclass(frozen=True)
class Asked:
    """What `elastic` was asked for.

    Attributes:
        global_batch: samples of a step.
        exact: the same bits on any number of ranks.
        options: of `Checkpoints`.
        parts: the user's own, of the run.
        best: steps that retention has to leave, as the best so far is one of them; changes.
    """

    global_batch: int
    exact: bool
    options: Mapping[str, Any]
    parts: Mapping[str, Any]
    best: set[int] = field(default_factory=set[int])


@dataclass
class Training:
    """One call of an elastic trainer's `train()`, filled in the order in which the Trainer asks.

    Attributes:
        which: what to resume; None starts anew.
        numbers: what the Trainer counts steps with, once it has asked for its data.
        prepared: what the Trainer's own preparation returned.
        counts: the Trainer's counts, once it is prepared.
        state: the run's parts, the counts among them.
        steps: of the loader, in the current epoch.
        step: that runs, or was last.
        flos: of this rank's microbatches of the last step.
        microbatch: the one that runs.
    """

    which: str | int | None
    numbers: DataLoader[int] | None = None
    prepared: Any = None
    counts: TrainerCounts | None = None
    state: anyrank.TrainState = field(default_factory=anyrank.TrainState)
    steps: Iterator[Any] | None = None
    step: Any = None
    flos: float = 0.0
    microbatch: Microbatch | None = None


class Microbatch(NamedTuple):
    """A microbatch that runs: its step, and its tokens where losses are weighted by tokens."""

    step: Any
    tokens: int | None


class TrainerCounts:
    """The Trainer's counts, logs and callbacks' states as a part of the run.

    As in the Trainer's own checkpoints they are the first rank's: times in the logs differ.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, str]:
        trainer: Any = self._trainer
        state = {k: v for k, v in asdict(trainer.state).items() if k not in NOT_SAVED}
        callbacks = {name: [one.state() for one in some] for name, some in self._named().items()}
        loss = list[float]()
        if hasattr(trainer, "_tr_loss"):
            loss = [trainer._tr_loss.item(), trainer._globalstep_last_logged]
        content = {"state": state, "callbacks": callbacks, "loss": loss}
        return {"json": json.dumps(content, default=float)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self._loaded = json.loads(state_dict["json"])

    def write(self, path: str) -> None:
        """Write the state that was loaded where the Trainer reads it."""
        names = self._loaded["callbacks"].items()
        callbacks = {name: some[0] if len(some) == 1 else some for name, some in names}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self._loaded["state"] | {"stateful_callbacks": callbacks}, file)

    def restore_callbacks(self) -> None:
        """Give callbacks what they had, in place: others may hold them."""
        saved_by = self._loaded.get("callbacks", {})
        for name, some in self._named().items():
            for callback, saved in zip(some, saved_by.get(name, []), strict=False):
                vars(callback).update(saved.get("attributes", {}))

    def restore_loss(self) -> None:
        """Go on with the mean loss since the last log line."""
        trainer: Any = self._trainer
        if self._loaded.get("loss"):
            loss, trainer._globalstep_last_logged = self._loaded["loss"]
            trainer._tr_loss += loss
            trainer._total_loss_scalar -= loss  # train_loss is of this call's steps
            self._loaded["loss"] = []

    def _named(self) -> dict[str, list[Any]]:
        """The callbacks that have a state, by the names of their classes."""
        handler, found = self._trainer.callback_handler, dict[str, list[Any]]()
        for callback in (*handler.callbacks, self._trainer.control):
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback)
        return found
