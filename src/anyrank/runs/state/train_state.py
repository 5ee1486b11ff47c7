"""`anyrank.TrainState`: everything that a run is made of, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anyrank.checks import check_model
from anyrank.runs.state.run_parts import RunParts
from anyrank.training.random_state.saved import RankCoords
from anyrank.training.steps.loader import ElasticLoader
from anyrank.world.ranks import Ranks


class TrainState:
    """The parts of a training run that are saved and resumed together.

    Make it on every rank, with the objects that the training loop uses: wrapped, sharded or
    compiled, real or on meta. It keeps references, and modifies nothing before a resume.

    Args:
        model: any module.
        optimizer: any torch optimizer of the model's parameters.
        scheduler: a learning-rate scheduler that steps once per optimizer step. Accelerate's
            wrapper, which steps once per process, is rejected.
        scaler: a GradScaler.
        data: an `ElasticLoader`, or any loader with `state_dict()`.
        seed: seed of the run; other generators are derived from it if a run continues on different
            ranks.
        generators: the run's own torch.Generators, by name; they are restored like the global
            random generators.
        first_rank: names of stateful parts whose state may differ between ranks, and for which the
            first rank's state is saved. A part that differs and is not named here is saved per
            rank and can only be resumed on the same number of ranks; so is `data` unless it is an
            `ElasticLoader`.
        base: source of the model's frozen parameters: a path, a URL or a list. Parameters that
            need no gradient, and belong to no optimizer and no adapter, are then not written; the
            source is, with a digest of their values that a resume compares. Load the base before
            the first call of `Checkpoints`, and freeze it before this one.
        others: further modules, optimizers, or any object with `state_dict()` and
            `load_state_dict()`: an EMA copy, a second optimizer, a tracker of metrics.

    Attributes:
        step: completed optimizer steps, over the whole run.
        samples: samples of completed steps, over the whole run.
        run: id of the run; None before its first save or resume.
        lineage: one entry for each resume: from which step, on how many ranks, without which parts.
        data: the `data` argument.
        parts: internal; may change without notice.

    Raises:
        TypeError: a part is neither a module nor an optimizer nor stateful, or an argument has
            the wrong type.
        ValueError: a part has a reserved name, a scheduler steps once per process, or `base` was
            passed without a model.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        ema = torch.optim.swa_utils.AveragedModel(model)
        state = anyrank.TrainState(model, optimizer, seed=1, ema=ema)
        with anyrank.Checkpoints("runs/a", state) as ckpts:
            ckpts.save()
            print(ckpts.resume().components)  # model, optimizer, ema and random: exact
        assert (state.step, state.samples, state.epoch) == (0, 0, 0)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        seed: int = 0,
        generators: Mapping[str, torch.Generator] | None = None,
        first_rank: Sequence[str] = (),
        base: Any = None,
        **others: Any,
    ) -> None:
        if model is not None:
            check_model(model)
        if isinstance(optimizer, nn.Module):
            raise TypeError(
                f"optimizer=: expected a torch optimizer, got {type(optimizer).__name__}"
            )
        named_parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "data": data,
        }
        parts = {name: part for name, part in (named_parts | others).items() if part is not None}
        own_generators = {} if generators is None else generators
        self.parts = RunParts(parts, seed, own_generators, first_rank, base)
        self.data = data
        self.step = 0
        self.samples = 0
        self.run: str | None = None
        self.lineage: list[dict[str, Any]] = []

    @property
    def epoch(self) -> int:
        """The epoch of the data; 0 without a loader that knows it."""
        return int(getattr(self.data, "epoch", 0))


def rank_coords(state: TrainState, ranks: Ranks) -> RankCoords:
    """Find this rank's position, also among the data-parallel ranks if the loader knows them."""
    data = (ranks.index, ranks.size)
    if isinstance(state.data, ElasticLoader):
        data = state.data.position.data_rank()
    return RankCoords(ranks.index, ranks.size, *data)
