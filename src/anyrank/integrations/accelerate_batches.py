"""The microbatches of an `ElasticLoader`, for a loop over a DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

from accelerate.utils import send_to_device
from torch import nn

from anyrank.integrations.run import FrameworkRun

log = logging.getLogger("anyrank.integrations")


class ElasticBatches:
    """The training DataLoader that an anyrank Accelerator's `prepare` returns.

    An iteration yields this rank's microbatches of an epoch, step by step. `len` is the number of
    optimizer steps in an epoch. Complete epochs yield nothing, so that a loop over `range(epochs)`
    continues at the run's position.

    Args:
        accelerator: the Accelerator whose models are trained.
        run: makes the loader, and counts the steps.
        dataloader: the user's DataLoader.

    Attributes:
        loader: the `anyrank.ElasticLoader`.
        dataset: the DataLoader's dataset, where users expect it.
        batch_size: samples of a microbatch.
        step: the step of the current or last microbatch.
        is_running: whether the loop is in the body of a microbatch.
        is_in_finished_epoch: whether the loop over epochs is in one that was already complete.
        unstepped: ids of the prepared schedulers that have not stepped since the epoch started.
    """

    def __init__(self, accelerator: Any, run: FrameworkRun, dataloader: Any) -> None:
        self.loader = run.make_loader(dataloader)
        self.dataset = dataloader.dataset
        self.batch_size: int = run.microbatch or dataloader.batch_size
        self.step: Any = None
        self.is_running = self.is_in_finished_epoch = False
        self.unstepped = set[int]()
        self._accelerator = accelerator
        self._run = run
        self._models: nn.ModuleList | None = None
        self._microbatches: Iterator[Any] | None = None  # of the current step, until it is complete
        self._num_backwards = 0  # in the current step
        self._num_iterations = 0
        self._interrupted_epoch: int | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the training DataLoader that prepare() returns has no {name!r}. It has len(), "
            "dataset, batch_size, set_epoch() and loader (the ElasticLoader). load_state() "
            "restores its position, so do not skip batches yourself (skip_first_batches)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for a loop that does not start at 0."""
        self._num_iterations = epoch

    def __iter__(self) -> Generator[Any, None, None]:
        self._run.begin(
            "Call accelerator.load_state() before the loop (it also starts a new run if the folder "
            "is empty)"
        )
        self._run.count()  # counts the last epoch's last step, with the code after its loop
        epoch, self._num_iterations = self._num_iterations, self._num_iterations + 1
        self.is_in_finished_epoch = self.loader.epoch > epoch
        if self.is_in_finished_epoch:
            log.info("epoch %d is already complete: no batches", epoch)
            return
        begun = self.loader.epoch
        self.unstepped = {id(scheduler) for scheduler in self._accelerator._schedulers}
        if self._interrupted_epoch == begun:
            log.warning(
                "the previous loop stopped in epoch %d; this one yields the remaining batches, so "
                "that every sample is seen once",
                begun,
            )
        # One container for all loops, because a model's first step is checked.
        self._models = models = self._models or self._accelerator.prepared_models()
        try:
            for step in self.loader:
                yield from self._bodies(step, models)
                self.complete()
                if self.loader.step == step.number:  # not counted yet, for instance by a save
                    self._run.note_step()  # also if a GradScaler skipped it
                    self._run.count(hold=step.ends_epoch)
        finally:
            self._interrupted_epoch = begun if self.loader.epoch == begun else None
            self._leave()

    def _bodies(self, step: Any, models: nn.ModuleList) -> Generator[Any, None, None]:
        """Yield the microbatches of a step on this rank."""
        self.step, self._num_backwards = step, 0
        self._microbatches = microbatches = step.microbatches(models)
        is_last = False
        while not is_last:  # `complete` ends the iterator
            batch = next(microbatches)
            is_last = self._accelerator.sync_gradients = step.is_last
            self.is_running = True
            yield self._to_device(batch)
            self.is_running = False

    @property
    def is_within_step(self) -> bool:
        """Whether microbatches have run since the last optimizer step."""
        is_counted = self.step is not None and self.loader.step > self.step.number
        return self.is_running and not (self._run.has_stepped or is_counted)

    def _to_device(self, batch: Any) -> Any:
        """Move a batch to the model's device."""
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return batch
        return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)

    def scale(self, loss: Any, weight: Any) -> Any:
        """Weight a microbatch's mean loss for its backward.

        Raises:
            ValueError: outside the loop, or the gradients of the step are already complete.
        """
        if not self.is_running:
            raise ValueError(
                "accelerator.backward() was called outside the loop over the training DataLoader "
                "(the first one passed to prepare())"
            )
        if self._microbatches is None:
            raise ValueError(
                "accelerator.backward() was called after clipping, or after the optimizer's step, "
                "in the last microbatch of a step. Run all backward passes first. For optimizers "
                "that alternate (a GAN), use anyrank.Checkpoints in your own training loop"
            )
        self._num_backwards += 1
        return self.step.scale(loss, weight)

    def complete(self) -> bool:
        """Complete the gradients in a step's last microbatch; return True if this is the last one.

        Raises:
            ValueError: no backward was run in the step.
        """
        if not self._accelerator.sync_gradients:
            return False
        if self._microbatches is not None:
            microbatches, self._microbatches = self._microbatches, None
            if not self._num_backwards:
                raise ValueError(
                    "optimizer.step() without accelerator.backward(loss). Use it instead of "
                    "loss.backward(), in the loop over the training DataLoader (the first one "
                    "passed to prepare())"
                )
            # The iterator's end reduces what no wrapper reduces, scales and verifies.
            left = next(microbatches, None)
            assert left is None
        return True

    def clips_exactly(self, parameters: list[Any]) -> bool:
        """Return True if the step clips these itself: all models' gradients, with exact=True."""
        if not self._run.is_exact or self._models is None:
            return False
        trained = {id(p) for p in self._models.parameters() if p.grad is not None}
        return trained == {id(p) for p in parameters if p.grad is not None}

    def clip(self, max_norm: float, norm_type: float) -> Any:
        """Clip all gradients by a norm that has the same bits on any number of ranks."""
        self._accelerator.unscale_gradients()
        return self.step.clip_grad_norm_(max_norm, norm_type)

    def _leave(self) -> None:
        """Drop the rest of a loop that was left in the middle of a step."""
        self.is_running = False
        self._accelerator.sync_gradients = True
        microbatches, self._microbatches = self._microbatches, None
        if isinstance(microbatches, Generator):
            microbatches.close()
