"""The counts of a Lightning Trainer as a part of a run; checks of options that a run excludes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"}
OTHER_STRATEGIES = {"DeepSpeedStrategy", "FSDPStrategy"}  # the first one is a DDPStrategy too
# Callbacks that change the accumulation or the loops themselves.
REFUSED = {"GradientAccumulationScheduler", "StochasticWeightAveraging"}
TUNERS = {"BatchSizeFinder", "LearningRateFinder"}  # run their own training steps within fit
# Counts that Lightning resets at the start of an epoch, by their names in the loops' state.
WITHIN_EPOCH = {
    "epoch_loop.batch_progress": lambda loop: loop.batch_progress,
    "epoch_loop.scheduler_progress": lambda loop: loop.scheduler_progress,
    "epoch_loop.automatic_optimization.optim_progress": (
        lambda loop: loop.automatic_optimization.optim_progress
    ),
    "epoch_loop.val_loop.batch_progress": lambda loop: loop.val_loop.batch_progress,
}


class Steps:
    """The data that Lightning iterates over in place of the DataLoader: one step is one batch.

    Args:
        loader: the loader of the steps.
        iterate: function that returns the steps of the rest of an epoch.
    """

    def __init__(self, loader: Any, iterate: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._iterate_steps = loader, iterate

    def __len__(self) -> int:
        return len(self._loader)  # TypeError for a stream, whose number of rows is unknown

    def __iter__(self) -> Iterator[Any]:
        return self._iterate_steps()

    # The position is saved in a different part. These methods show Lightning that it is not lost.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


class LoopState:
    """The state of a Trainer's loops, callbacks and DataModule, between two steps.

    Args:
        trainer: the Trainer whose `fit` is about to run.
        loader: the loader of the steps.

    Attributes:
        modules: modules that callbacks hold; each is a separate part of the run.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        self.modules: dict[str, Any] = {**_modules_of_callbacks(trainer)}
        self._fit_trainer = trainer
        self._loader = loader
        self._within_epoch: dict[str, Any] | None = None  # to restore after Lightning resets it

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a save.

        Raises:
            ValueError: a callback made a module that the run does not have.
        """
        trainer = self._fit_trainer
        if _modules_of_callbacks(trainer).keys() != self.modules.keys():
            raise ValueError(
                "a callback created a module after on_fit_start, too late for a resume. Create it "
                "in the callback's setup()"
            )
        loops = trainer.fit_loop.state_dict()
        # A run that stops in the middle of an epoch has counted the epoch as processed.
        for tracker in loops["epoch_progress"].values():
            tracker["processed"] = min(tracker["processed"], self._loader.epoch)
            tracker["completed"] = min(tracker["completed"], self._loader.epoch)
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        datamodule = trainer.datamodule
        return {
            "loops": loops,
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "datamodule": datamodule.state_dict() if datamodule is not None else {},
            "module": self._from_hooks(),
            # The end of an epoch may need metrics that were measured before the run stopped.
            "metrics": dict(trainer.callback_metrics),
        }

    def _from_hooks(self) -> dict[str, Any]:
        """Return the entries that the LightningModule's hook adds to a checkpoint."""
        module = self._fit_trainer.lightning_module
        checkpoint = {"state_dict": module.state_dict()}
        module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key != "state_dict"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._fit_trainer
        loops = state_dict["loops"]
        trainer.fit_loop.load_state_dict(deepcopy(loops))
        total = loops["epoch_progress"]["total"]
        is_within = total["started"] > total["processed"]
        self._within_epoch = {name: loops[name] for name in WITHIN_EPOCH} if is_within else None
        for callback in trainer.callbacks:
            if callback.state_key in state_dict["callbacks"]:
                callback.load_state_dict(deepcopy(state_dict["callbacks"][callback.state_key]))
        if trainer.datamodule is not None and state_dict["datamodule"]:
            trainer.datamodule.load_state_dict(state_dict["datamodule"])
        trainer.callback_metrics.update(state_dict["metrics"])
        module = trainer.lightning_module
        module.on_load_checkpoint({**state_dict["module"], "state_dict": module.state_dict()})

    def begin_at(self, step: int) -> None:
        """Count from this step, for a run that starts from another tool's checkpoint."""
        loop = self._fit_trainer.fit_loop
        epoch_loop = loop.epoch_loop
        optimizer = epoch_loop.automatic_optimization.optim_progress.optimizer
        loop.epoch_progress.increment_by(self._loader.epoch)
        for progress in (epoch_loop.batch_progress.total, optimizer.step.total):
            progress.increment_by(step)
        epoch_loop._batches_that_stepped = step

    def end_epoch(self) -> None:
        """Mark the trained step as the last of its epoch."""
        loop = self._fit_trainer.fit_loop
        loop._data_fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = True

    def restore_within_epoch(self) -> None:
        """Restore the counts that Lightning reset at the start of the resumed epoch."""
        if self._within_epoch is None:
            return
        loop = self._fit_trainer.fit_loop
        for name, progress in WITHIN_EPOCH.items():
            progress(loop.epoch_loop).load_state_dict(self._within_epoch[name])
        loop._data_fetcher.fetched += loop.epoch_loop.batch_progress.current.ready
        loop._restarting = False  # otherwise the epoch's end would skip a scheduler
        self._within_epoch = None


class Replaced:
    """Replaced attributes of single objects of a Trainer, while its `fit` runs."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._step: Any = None  # the current or last one

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace a method of this one object."""
        setattr(owner, name, value)
        self._undo.append(lambda: vars(owner).pop(name, None))

    def take_over(self, trainer: Any, train: Callable[..., Any], exact: bool) -> None:
        """Turn a Trainer's batch into a step, whose forward and backward `train` runs.

        Args:
            trainer: the Trainer; its strategy is set up.
            train: called with the strategy's own `training_step` and its arguments.
            exact: let the step clip by norm, because Lightning's norm depends on the sharding.
        """
        strategy, module = trainer.strategy, trainer.lightning_module
        original, to_device = strategy.training_step, strategy.batch_to_device
        before = module._on_before_batch_transfer

        def trained(step: Any, *args: Any) -> Any:
            self._step = step
            return train(original, step, *args)

        def unless_step(transfer: Callable[..., Any]) -> Callable[..., Any]:
            def moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
                is_step = hasattr(batch, "microbatches")
                return batch if is_step else transfer(batch, *args, **kwargs)

            return moved

        self.set(strategy, "training_step", trained)
        if exact:
            self._clip_exactly(trainer)
        self.set(strategy, "batch_to_device", unless_step(to_device))
        self.set(module, "_on_before_batch_transfer", unless_step(before))
        # `train` runs zero_grad and backward, with their hooks.
        trainer.fit_loop._skip_backward = True
        self._undo.append(lambda: setattr(trainer.fit_loop, "_skip_backward", False))

    def _clip_exactly(self, trainer: Any) -> None:
        original = trainer.lightning_module.clip_gradients

        def clip(
            optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            asked, kind = trainer.gradient_clip_val, gradient_clip_algorithm
            value = asked if gradient_clip_val is None else gradient_clip_val
            kind = kind or trainer.gradient_clip_algorithm or "norm"
            if value and asked in (None, value) and kind.lower() == "norm":
                self._step.clip_grad_norm_(value)
            else:
                original(optimizer, gradient_clip_val, gradient_clip_algorithm)

        self.set(trainer.lightning_module, "clip_gradients", clip)

    def restore(self) -> None:
        """Restore everything that was replaced."""
        while self._undo:
            self._undo.pop()()


def _modules_of_callbacks(trainer: Any) -> dict[str, nn.Module]:
    """Map part names to the modules that callbacks hold besides the model, such as an EMA copy."""
    model = {id(module) for module in trainer.lightning_module.modules()}
    modules: dict[str, nn.Module] = {}
    for callback in trainer.callbacks:
        for name, value in vars(callback).items():
            if isinstance(value, nn.Module) and id(value) not in model:
                part = f"{type(callback).__name__}_{name.strip('_')}"
                modules[f"{part}_{len(modules)}" if part in modules else part] = value
    return modules


def problems_of(trainer: Any, module: Any) -> Iterator[str]:
    """Yield the reasons why a `fit` cannot be resumed on a different number of ranks."""
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if not names & STRATEGIES or names & OTHER_STRATEGIES:
        yield (
            f"the strategy {type(trainer.strategy).__name__} is not supported. Use ddp for "
            "replicas, or ModelParallelStrategy with fully_shard in configure_model (FSDP2)"
        )
    if not module.automatic_optimization:
        yield (
            "manual optimization (automatic_optimization=False) is not supported, because it "
            "controls gradient synchronization itself. Use automatic optimization, or "
            "anyrank.Checkpoints in your own training loop"
        )
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"remove accumulate_grad_batches={trainer.accumulate_grad_batches}; global_batch "
            "determines the accumulation, on any number of ranks"
        )
    limit = trainer.limit_train_batches  # 1 is one batch, 1.0 is all of them
    if isinstance(limit, int) or limit != 1.0 or trainer.overfit_batches:
        yield (
            "limit_train_batches, overfit_batches and fast_dev_run skip samples of an epoch, but a "
            "run sees each sample once. Remove them, or pass a Subset as the dataset"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs changes the data during the run. Remove it"
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if name in REFUSED:
            yield f"{name} changes the loop that a resume must restore. Remove it"
        if name in TUNERS:
            yield f"{name} runs its own training steps within fit(). Use Lightning's Tuner first"
    if sum(type(callback).__name__ == "Elastic" for callback in trainer.callbacks) > 1:
        yield "it appears twice in Trainer(callbacks=[...]). Remove one"
