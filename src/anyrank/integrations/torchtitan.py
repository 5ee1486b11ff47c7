"""A CheckpointManager with torchtitan's interface, over a run that resumes on any number of ranks.

Tested with torchtitan 0.3, but imports nothing from it: it accepts torchtitan's own objects, or any
with the same interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import anyrank
from anyrank.integrations.run import numbered
from anyrank.versions import warn_if_untested

warn_if_untested("torchtitan")


class CheckpointManager:
    """The manager that saves and loads for a torchtitan trainer, with torchtitan's arguments.

    Collective: every rank must create one and call its methods. Files are those of
    `anyrank.Checkpoints`, in `base_folder/config.folder`. These settings of the configuration are
    used: enable, folder, interval, keep_latest_k (0 keeps all), async_mode, load_only,
    exclude_from_loading, enable_first_step_checkpoint, initial_load_path. The last save is always
    complete; last_save_model_only is ignored.

    torchtitan's own data loader has one state per rank, which can be resumed only on the same
    number of ranks, or skipped with exclude_from_loading=["dataloader"]. With an `ElasticLoader` in
    its place, every sample is seen once on any number of ranks.

    Attributes:
        enable: whether anything is saved or loaded.
        states: the parts, by torchtitan's names.
        report: the `ResumeReport` of the last load; None if there was nothing to load.

    Args:
        config: torchtitan's `CheckpointManager.Config`.
        dataloader: the data loader, or None.
        model_parts: the model, as the only entry.
        optimizers: an `OptimizersContainer`.
        lr_schedulers: an `LRSchedulersContainer`.
        states: further parts with a `state_dict`, such as {"train_state": trainer}.
        sd_adapter: not used.
        base_folder: the job's folder.
        seed: seed of the run.

    Raises:
        ValueError: several model parts (pipeline stages); Hugging Face files, whose keys anyrank
            does not map to torchtitan's names.

    Example::

        from types import SimpleNamespace as Shape

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        manager = anyrank.integrations.torchtitan.CheckpointManager(
            Shape(enable=True, folder="checkpoint", interval=2),
            dataloader=None,
            model_parts=[model],
            optimizers=Shape(optimizers=[optimizer]),
            lr_schedulers=Shape(schedulers=[]),
            states={},
        )
        assert not manager.load()
        assert [manager.save(step) for step in (1, 2)] == [False, True]
        assert manager.load(step=2)
    """

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
        seed: int = 0,
    ) -> None:
        self.enable = bool(config.enable)
        self.states = dict(states)
        self.report: anyrank.ResumeReport | None = None
        self.save_future = None  # only Checkpoints knows a background save
        if not self.enable:
            return
        if len(model_parts) != 1:
            raise ValueError(
                f"pipeline parallelism ({len(model_parts)} model parts) is not supported: stages "
                "differ between ranks, but a run has one model. Use torchtitan's own "
                "CheckpointManager"
            )
        for name in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(config, name, False):
                raise ValueError(
                    f"checkpoint.{name} is not supported, because Hugging Face files do not use "
                    "torchtitan's names. Convert them with torchtitan's scripts, or use its own "
                    "CheckpointManager"
                )
        self._config = config
        self._model = model_parts[0]
        steppers = numbered("optimizer", optimizers.optimizers)
        schedulers = numbered("scheduler", lr_schedulers.schedulers)
        self._names = {  # of torchtitan's parts in the run
            "dataloader": ["data"],
            "optimizer": list(steppers),
            "lr_scheduler": list(schedulers),
        }
        parts = steppers | schedulers | self.states
        self._state = anyrank.TrainState(self._model, data=dataloader, seed=seed, **parts)
        keep = getattr(config, "keep_latest_k", 10)
        self._checkpoints = anyrank.Checkpoints(
            os.path.join(base_folder, config.folder),
            self._state,
            keep=keep or 1 << 30,
            background=str(getattr(config, "async_mode", "disabled")).lower() != "disabled",
        )

    def load(self, step: int = -1) -> bool:
        """Restore a step, or the newest for -1; return True if there was one.

        In an empty folder, load the weights of `initial_load_path` if it is set.

        Raises:
            CheckpointError: as for `Checkpoints.resume`.
        """
        if not self.enable:
            return False
        left = getattr(self._config, "exclude_from_loading", ())
        skip = [part for name in left for part in self._names.get(name, [name])]
        self.report = self._checkpoints.resume("auto" if step == -1 else step, skip=skip)
        if self.report is not None:
            return True
        source = getattr(self._config, "initial_load_path", None)
        if source is None:
            return False
        if not getattr(self._config, "initial_load_model_only", True):
            raise ValueError(
                "initial_load_model_only=False: only the weights of a torchtitan checkpoint can be "
                "loaded. Set initial_load_model_only=True"
            )
        anyrank.load(self._model, source)
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save a step if it is due or the last; return True if it was saved.

        Raises:
            CheckpointError: as for `Checkpoints.save`.
        """
        if not self.enable or getattr(self._config, "load_only", False):
            return False
        is_first = curr_step == 1 and getattr(self._config, "enable_first_step_checkpoint", False)
        if not (last_step or is_first or curr_step % self._config.interval == 0):
            return False
        self._state.step = curr_step
        self._checkpoints.save(unless_saved=True)
        return True

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: `save` returns once its copy is done."""

    def maybe_wait_for_saving(self) -> None:
        """Wait for the background save, if any.

        Raises:
            CheckpointError: the background save failed.
        """
        if self.enable:
            self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the background save, and release the folder."""
        if self.enable:
            self._checkpoints.close()
