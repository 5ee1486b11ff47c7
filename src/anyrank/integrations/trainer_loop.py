"""A transformers Trainer whose batch is a whole step, so that none of its counts knows ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

import anyrank
from anyrank.integrations.dataloaders import elastic_loader
from anyrank.integrations.trainer_best import BestStep
from anyrank.integrations.trainer_checks import (
    check_other_checkpoints,
    check_recompute,
    step_to_resume,
    without_sharding,
)
from anyrank.integrations.trainer_run import Microbatch, TrainerCounts, Training


class ElasticTrainer(BestStep):
    """What `elastic` puts in front of a trainer's own class."""

    # -- the run ----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train to the end, from the newest step, a step's path, or anew. All ranks.

        Raises:
            ValueError: `trial`; a path outside of the run; a new run where there is one;
                gradient_checkpointing besides enable_recompute().
            CheckpointError: the run does not fit; as `Checkpoints.resume` and `save`.
        """
        if trial is not None:
            raise ValueError("hyperparameter search makes many runs of one trainer: make one each")
        check_recompute(self.model, self.args)
        which = step_to_resume(self.elastic.folder, resume_from_checkpoint)
        self._elastic_training = Training(which)
        # At its end the last step is saved, and the folder is released.
        with ExitStack() as self._elastic_stack:
            try:
                return super().train(ignore_keys_for_eval=ignore_keys_for_eval)
            finally:
                self._elastic_training = Training(None)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> Any:
        # The state is known once the run is resumed, which needs what the Trainer prepares next.
        training = self._elastic_training
        training.prepared = self._elastic_prepare(max_steps)
        training.counts = counts = TrainerCounts(self)
        self._elastic_open(training, counts)
        with tempfile.TemporaryDirectory() as folder:
            path = None
            if self.elastic.report is not None:
                path = folder
                counts.write(os.path.join(folder, "trainer_state.json"))
            found = super()._init_training_state(
                max_steps, num_update_steps_per_epoch, num_train_epochs, path, trial
            )
        counts.restore_callbacks()
        self._elastic_find_best()
        return found

    def _elastic_prepare(self, max_steps: int) -> Any:
        """The Trainer's own preparation; a model that is sharded already stays as it is."""
        loaded = self.is_distributed_loading_by_transformers
        model: Any = self.model_wrapped
        is_sharded = any(isinstance(part, FSDPModule) for part in model.modules())
        self.is_distributed_loading_by_transformers = loaded or is_sharded
        try:
            return super()._prepare_for_training(max_steps, self._elastic_training.numbers, None)
        finally:
            self.is_distributed_loading_by_transformers = loaded

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        return self._elastic_training.prepared

    def _elastic_open(self, training: Training, counts: TrainerCounts) -> None:
        """Bind the parts of the run, and resume it. All ranks."""
        run, asked = self.elastic, self._elastic_asked
        training.state = anyrank.TrainState(
            self.model_wrapped,
            self.optimizer,  # pyright: ignore[reportArgumentType]
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            data=run.loader,
            seed=self.args.seed,
            trainer=counts,
            first_rank=["trainer"],
            **asked.parts,
        )
        run.report = None
        run.checkpoints = ckpts = anyrank.Checkpoints(run.folder, training.state, **asked.options)
        self._elastic_stack.enter_context(ckpts)
        if training.which is not None:
            run.report = ckpts.resume(training.which)
            if run.report is None:
                check_other_checkpoints(str(self.args.output_dir), run.folder)
        elif ckpts.saved():
            raise ValueError(
                f"{run.folder}: holds a run, and train() without resume_from_checkpoint starts a "
                "new one: give resume_from_checkpoint=True, or another folder"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the run, where the Trainer would write checkpoint-N. All ranks."""
        self.store_flos()
        self._elastic_count()
        assert self.elastic.checkpoints is not None
        self.elastic.checkpoints.save(unless_saved=True)
        self._elastic_note_saved()

    def _elastic_count(self) -> None:
        """Count the step that the optimizer has made, unless it is counted. All ranks."""
        if self._elastic_training.state.step < self.state.global_step:
            assert self.elastic.checkpoints is not None
            self.elastic.checkpoints.step_done()

    # -- the data ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The numbers of an epoch's steps, while the trainer trains; else the Trainer's own."""
        run, training = self.elastic, self._elastic_training
        plain = super().get_train_dataloader()
        if not self.is_in_train:
            return plain
        if training.numbers is None:
            run.loader = elastic_loader(
                without_sharding(plain),
                global_batch=self._elastic_asked.global_batch,
                microbatch=self.args.per_device_train_batch_size,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                exact=self._elastic_asked.exact,
            )
            numbers: Any = range(len(run.loader))
            # With a generator of its own it draws nothing from the ambient stream.
            training.numbers = DataLoader(numbers, generator=torch.Generator())
        return training.numbers

    def num_examples(self, dataloader: Any) -> int:
        """Samples of an epoch."""
        if dataloader is self._elastic_training.numbers:
            return len(self.train_dataset)  # pyright: ignore[reportArgumentType]
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step."""
        return self._elastic_asked.global_batch

    def _run_epoch(self, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        run, training = self.elastic, self._elastic_training
        assert run.loader is not None
        if self.state.global_step >= self.state.max_steps:  # resumed at its end
            self.control.should_training_stop = True
            return
        if kwargs["epoch"] == kwargs["epochs_trained"] and run.report is not None:
            kwargs["resume_from_checkpoint"] = run.report.path  # so that the numbers are skipped
            if training.counts is not None:
                training.counts.restore_loss()
        training.steps = steps = iter(run.loader)
        try:
            super()._run_epoch(**kwargs)
            if run.loader.epoch > kwargs["epoch"]:
                next(steps, None)  # compares what was read with what was to be read
            elif not self.control.should_training_stop:
                raise ValueError(
                    f"epoch {kwargs['epoch']} was left before its end (should_epoch_stop), and the "
                    "rest of its samples would be lost: stop the training instead"
                )
        finally:
            steps.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """The next step, as the only batch."""
        steps = self._elastic_training.steps
        assert steps is not None  # _run_epoch has begun them
        next(epoch_iterator)
        return [next(steps)], None

    # -- a step -----------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Forward and backward of this rank's microbatches. Returns the step's mean loss."""
        training, step = self._elastic_training, inputs
        training.step, training.flos = step, 0.0
        for batch in step.microbatches(model):
            # Counted on the host: a count on the device would make the host wait for it.
            with self._elastic_rank_alone():
                tokens: Any = self._get_num_items_in_batch([batch], torch.device("cpu"))
            training.microbatch = Microbatch(step, None if tokens is None else int(tokens))
            if tokens is not None:  # without any token its loss is 0, not 0 / 0
                tokens = tokens.clamp(min=1).to(self.args.device)
            self._elastic_look(batch, step.is_copy)
            try:
                # A step weights over all ranks: compute_loss must not do so by itself.
                with self._elastic_rank_alone():
                    super().training_step(model, batch, tokens)
            finally:
                training.microbatch = None
        return torch.tensor(step.loss(), device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """With exact=True the step's own, as accelerate adds up by shard."""
        if not self._elastic_asked.exact:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return self._elastic_training.step.clip_grad_norm_(self.args.max_grad_norm)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As without elastic; while a step runs, weighted for its global mean."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        running = self._elastic_training.microbatch
        if running is None:
            return result
        if isinstance(result, tuple):
            return (running.step.scale(result[0], running.tokens), *result[1:])
        return running.step.scale(result, running.tokens)

    @contextmanager
    def _elastic_rank_alone(self) -> Generator[None]:
        """The Trainer counts tokens on this rank alone."""
        across = self.args.average_tokens_across_devices
        try:
            self.args.average_tokens_across_devices = False
            yield
        finally:
            self.args.average_tokens_across_devices = across

    def _elastic_look(self, batch: Any, is_copy: bool) -> None:
        """Count a microbatch's operations and tokens, as the Trainer does for a batch."""
        if not is_copy:
            self._elastic_training.flos += float(super().floating_point_ops(batch))
        elif isinstance(batch, Mapping):  # all ranks gather, and a copy counts nothing
            batch = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        super()._track_num_input_tokens(batch)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Of a step, this rank's; of a batch, as the Trainer's."""
        is_step = hasattr(inputs, "microbatches")
        return self._elastic_training.flos if is_step else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not hasattr(inputs, "microbatches"):
            super()._track_num_input_tokens(inputs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._elastic_count()  # after the log, so that a save has it
