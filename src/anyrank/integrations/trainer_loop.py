"""A transformers Trainer whose batch is a whole step, so that its counts do not depend on ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState

import anyrank
from anyrank.integrations.run import FrameworkRun
from anyrank.integrations.trainer_checks import (
    check_other_checkpoints,
    check_recompute,
    without_sharding,
)

log = logging.getLogger("anyrank.integrations")

# The part of its state that the Trainer counts and logs; the rest follows from its arguments.
COUNTS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "log_history",
    "best_metric",
    "best_global_step",
)


class ElasticRun(FrameworkRun):
    """The run of an elastic trainer: its attribute `elastic`.

    Attributes:
        folder: path or URL of the run.
        loader: the `ElasticLoader` of the last `train()`; None before the first one.
        checkpoints: its `Checkpoints`; None before the first `train()`.
        report: the `ResumeReport` of the last `train()`; None if it started a new run.
    """


class Endless(IterableDataset[int]):
    """The numbers of steps, for data whose steps per epoch are unknown."""

    def __iter__(self) -> Iterator[int]:
        return count()


class Microbatch(NamedTuple):
    """A running microbatch: its step, and its tokens if losses are weighted by tokens."""

    step: Any
    tokens: int | None


@dataclass
class Training:
    """The request of an elastic trainer's `train()`, and its progress.

    Attributes:
        global_batch: samples of a step.
        parts: the user's own parts of the run.
        best: the steps that retention must keep, because one of them is the best so far.
        numbers: the data with which the Trainer counts steps, once the Trainer has requested it.
        which: the step or path that `train` resumes; None or False starts a new run.
        prepared: the result of the Trainer's own preparation.
        steps: the loader's steps in the current epoch.
        step: the current or last step.
        microbatch: the current microbatch.
    """

    global_batch: int
    parts: Mapping[str, Any]
    best: set[int] = field(default_factory=set[int])
    numbers: DataLoader[int] | None = None
    which: str | bool | None = None
    prepared: Any = None
    steps: Generator[Any, None, None] | None = None
    step: Any = None
    microbatch: Microbatch | None = None


class TrainerCounts:
    """The Trainer's counts, its logs and the states of callbacks, as a part of the run.

    As in the Trainer's own checkpoints, those of the first rank are saved: times in logs differ.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        state = {name: getattr(self._trainer.state, name) for name in COUNTS}
        callbacks = {name: [c.state() for c in some] for name, some in self._named().items()}
        return {"json": json.dumps({"state": state, "callbacks": callbacks}, default=float)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Set them in place, because other objects may hold the callbacks."""
        loaded = json.loads(state_dict["json"])
        vars(self._trainer.state).update({name: loaded["state"][name] for name in COUNTS})
        for name, some in self._named().items():
            for callback, saved in zip(some, loaded["callbacks"].get(name, []), strict=False):
                vars(callback).update(saved.get("attributes", {}))

    def _named(self) -> dict[str, list[Any]]:
        """Map names of classes to the callbacks of that class that have a state."""
        named = dict[str, list[Any]]()
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                named.setdefault(type(callback).__name__, []).append(callback)
        return named


class ElasticTrainer(Trainer):
    """The class that `elastic` puts in front of a trainer's own class."""

    elastic: ElasticRun
    _elastic: Training

    # -- the run ----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train to the end, from the newest step, from a path, or as a new run.

        Collective: every rank must call it.

        Raises:
            ValueError: `trial`; a new run in a folder that contains one; gradient_checkpointing
                together with enable_recompute().
            CheckpointError: as for `Checkpoints.resume` and `save`.
        """
        if trial is not None:
            raise ValueError(
                "hyperparameter search makes many runs with one trainer, which elastic() does not "
                "support. Make one trainer per run"
            )
        check_recompute(self.model, self.args)
        self._elastic.numbers, self._elastic.which = None, resume_from_checkpoint
        with self.elastic:  # at its end the last step is saved, and the folder is released
            return super().train(ignore_keys_for_eval=ignore_keys_for_eval)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        # The state is known after the resume, which needs what the Trainer prepares next.
        self._elastic.prepared = self._elastic_prepare(max_steps)
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial
        )
        self._elastic_resume()
        loader, state = self.elastic.loader, self.elastic.state
        assert loader is not None
        assert state is not None
        self.state.global_step = state.step  # also for a run that another tool started
        self._elastic_find_best()
        return loader.epoch, loader.consumed // self._elastic.global_batch

    def _elastic_resume(self) -> None:
        """Resume the run, or start it. Collective."""
        run, which = self.elastic, self._elastic.which
        run.report = None
        if which is None or which is False:
            run.begin(
                "To resume it, pass resume_from_checkpoint=True (train() without it starts a new "
                "run)"
            )
            return
        run.resume("auto" if which is True else which)
        if run.report is None:
            check_other_checkpoints(str(self.args.output_dir), run.folder)

    def _elastic_prepare(self, max_steps: int) -> Any:
        """Run the Trainer's own preparation; a model that is already sharded is unchanged."""
        loaded = self.is_distributed_loading_by_transformers
        model: Any = self.model_wrapped
        is_sharded = any(isinstance(part, FSDPModule) for part in model.modules())
        self.is_distributed_loading_by_transformers = loaded or is_sharded
        try:
            return super()._prepare_for_training(max_steps, self._elastic.numbers, None)
        finally:
            self.is_distributed_loading_by_transformers = loaded

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        return self._elastic.prepared

    def _elastic_state(self) -> anyrank.TrainState:
        """Make the state of a run from everything that the Trainer has prepared."""
        return anyrank.TrainState(
            self.model_wrapped,
            self.optimizer,  # pyright: ignore[reportArgumentType]
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            data=self.elastic.loader,
            seed=self.args.seed,
            trainer=TrainerCounts(self),
            first_rank=["trainer"],
            **self._elastic.parts,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the run in place of the Trainer's checkpoint-N. Collective."""
        self.elastic.save()
        self._elastic_keep_best()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # After the log, so that a save contains it; at an epoch's end, after the evaluation that
        # follows and may step the scheduler.
        step = self._elastic.step
        self.elastic.count(hold=step is not None and step.ends_epoch)

    # -- the best step is kept, and loaded at the end ---------------------------------------------

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        is_best = super()._determine_best_metric(*args, **kwargs)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True  # also if only an evaluation is due
        return is_best

    def _elastic_keep_best(self) -> None:
        """Keep the saved step, instead of the previous best, if it is the best so far."""
        ckpts, state = self.elastic.checkpoints, self.state
        assert ckpts is not None
        if self.args.load_best_model_at_end and state.best_global_step == state.global_step:
            ckpts.wait()
            self._elastic_set_best(ckpts.latest())

    def _elastic_find_best(self) -> None:
        """Keep the best step so far, if it still exists, after a resume."""
        ckpts, best = self.elastic.checkpoints, self.state.best_global_step
        assert ckpts is not None
        if not self.args.load_best_model_at_end or best is None:
            return
        path = next((saved.path for saved in ckpts.saved() if saved.step == best), None)
        self._elastic_set_best(path)
        if path is None:
            log.warning(
                "%s: the best step so far, %d, no longer exists. load_best_model_at_end loads a "
                "later step if one is better, else none",
                self.elastic.folder,
                best,
            )

    def _elastic_set_best(self, path: str | None) -> None:
        best, kept = self.state.best_global_step, self._elastic.best
        self.state.best_model_checkpoint = path
        kept.clear()
        kept.update([] if best is None else [best])

    def _load_best_model(self) -> None:
        """Load the weights of the best step, after the last step is saved. Collective."""
        ckpts, path = self.elastic.checkpoints, self.state.best_model_checkpoint
        assert ckpts is not None
        assert path is not None  # otherwise the Trainer does not call it
        self.elastic.save()
        ckpts.wait()
        model: Any = self.model_wrapped
        has_base = self._elastic.parts.get("base") is not None  # it was not written
        anyrank.load(model, path, missing="keep" if has_base else "error")

    # -- the data ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the numbers of an epoch's steps during training; else the Trainer's own data."""
        plain = super().get_train_dataloader()
        if not self.is_in_train:
            return plain
        if self._elastic.numbers is None:
            loader = self.elastic.make_loader(without_sharding(plain))
            numbers: Any = Endless()
            with suppress(TypeError):  # of a stream
                numbers = range(len(loader))
            # With its own generator it draws nothing from torch's default generator.
            self._elastic.numbers = DataLoader(numbers, generator=torch.Generator())
        return self._elastic.numbers

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in an epoch."""
        if dataloader is self._elastic.numbers:
            if not hasattr(self.train_dataset, "__len__"):
                return self._elastic.global_batch * self.args.max_steps
            return len(self.train_dataset)  # pyright: ignore[reportArgumentType]
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples in a step."""
        return self._elastic.global_batch

    def _run_epoch(self, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        run, epoch = self.elastic, kwargs["epoch"]
        assert run.loader is not None
        if self.state.global_step >= self.state.max_steps:  # resumed at its end
            self.control.should_training_stop = True
            return
        if epoch == kwargs["epochs_trained"] and run.report is not None:
            kwargs["resume_from_checkpoint"] = run.report.path  # so that the numbers are skipped
        self._elastic.steps = steps = iter(run.loader)
        try:
            super()._run_epoch(**kwargs)
            if run.loader.epoch > epoch:
                next(steps, None)  # compares the samples read with the planned ones
            elif not self.control.should_training_stop:
                raise ValueError(
                    f"epoch {epoch} was left before its end (should_epoch_stop), so the rest of "
                    "its samples would be lost. Set should_training_stop instead"
                )
        finally:
            steps.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """Return the next step, as the only batch; none after the end of a stream's epoch."""
        assert self._elastic.steps is not None  # _run_epoch has started them
        return [*islice(self._elastic.steps, 1)], None

    # -- a step -----------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run forward and backward of this rank's microbatches; return the step's mean loss."""
        training, step = self._elastic, inputs
        training.step = step
        for batch in step.microbatches(model):
            # Counted on the host, because the host would wait for a count on the device.
            with self._elastic_rank_alone():
                tokens: Any = self._get_num_items_in_batch([batch], torch.device("cpu"))
            training.microbatch = Microbatch(step, None if tokens is None else int(tokens))
            if tokens is not None:  # without tokens the loss is 0, not 0 / 0
                tokens = tokens.clamp(min=1).to(self.args.device)
            super()._track_num_input_tokens(batch)
            try:
                # The step weights over all ranks, so compute_loss must not.
                with self._elastic_rank_alone():
                    super().training_step(model, batch, tokens)
            finally:
                training.microbatch = None
        self.elastic.note_step()
        return self.elastic.mean_loss(step).float().to(self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip by the step's own norm if exact=True, because accelerate's depends on sharding."""
        if not self.elastic.is_exact:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return self._elastic.step.clip_grad_norm_(self.args.max_grad_norm)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the Trainer does; during a step, weighted for the global mean."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        running = self._elastic.microbatch
        if running is None:
            return result
        if isinstance(result, tuple):
            return (running.step.scale(result[0], running.tokens), *result[1:])
        return running.step.scale(result, running.tokens)

    @contextmanager
    def _elastic_rank_alone(self) -> Generator[None]:
        """Let the Trainer count only the tokens of this rank."""
        across = self.args.average_tokens_across_devices
        try:
            self.args.average_tokens_across_devices = False
            yield
        finally:
            self.args.average_tokens_across_devices = across

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return 0 for the Trainer, because a step has no tensors to count."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not hasattr(inputs, "microbatches"):
            super()._track_num_input_tokens(inputs)
