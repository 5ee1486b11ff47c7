"""The microbatches of an `ElasticLoader`, as a loop over a DataLoader expects them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from math import ceil
from typing import Any

from accelerate.utils import send_to_device
from torch import nn

from anyrank.integrations.accelerate_run import AccelerateRun
from anyrank.integrations.dataloaders import elastic_loader

log = logging.getLogger("anyrank.integrations")


class ElasticBatches:
    """What an anyrank Accelerator's `prepare` makes of the training DataLoader.

    An iteration yields this rank's microbatches of an epoch, one step after the other. `len` is the
    number of optimizer steps in an epoch. Epochs that are finished already yield nothing, so that a
    loop over `range(epochs)` continues where the run is.

    Args:
        accelerator: whose models are trained.
        run: counts the steps.
        dataloader: the user's.
        options: of `elastic_loader`.

    Attributes:
        loader: the `anyrank.ElasticLoader`.
        dataset: that of the DataLoader, where users expect it.
        batch_size: samples of a microbatch.
        step: whose microbatch is run, or was last.
        is_running: whether the loop is in the body of a microbatch.
    """

    def __init__(
        self, accelerator: Any, run: AccelerateRun, dataloader: Any, **options: Any
    ) -> None:
        self.loader = elastic_loader(dataloader, **options)
        self.dataset = dataloader.dataset
        self.batch_size: int = options["microbatch"] or dataloader.batch_size
        self.step: Any = None
        self._is_exact: bool = options["exact"]
        self.is_running = False
        self._accelerator = accelerator
        self._run = run
        self._models: nn.ModuleList | None = None
        self._microbatches: Iterator[Any] | None = None  # of the step, until it is complete
        self._losses = 0  # backward passes in the step
        self._passes = 0
        self._is_told = False
        self._left: int | None = None  # epoch that a pass was broken off in

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the training DataLoader that prepare() returns has no {name!r}: it has len(), "
            "dataset, batch_size, set_epoch() and loader, the ElasticLoader; load_state() restores "
            "its position, so no batches are to be skipped by hand (skip_first_batches)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, for a loop that does not begin at 0."""
        self._passes = epoch

    def __iter__(self) -> Generator[Any, None, None]:
        self._run.begin_pass()
        epoch, self._passes = self._passes, self._passes + 1
        if self.loader.epoch > epoch:
            log.info("epoch %d was finished before: it yields nothing", epoch)
            self._run.is_in_finished_epoch = True
            return
        self._run.is_in_finished_epoch = False
        begun = self.loader.epoch
        if self._left == begun:
            log.warning(
                "the pass before was left within epoch %d: this one has the rest of it, so that "
                "every sample is seen once",
                begun,
            )
        # One container for all passes: the first step of a model is checked.
        self._models = models = self._models or self._accelerator.prepared_models()
        try:
            for step in self.loader:
                yield from self._bodies(step, models)
                self.complete()
                if self.loader.step == step.number:  # not counted yet, as by a save in the body
                    self._look_at_optimizer(step.number)
                    self._run.has_stepped = True  # also where a GradScaler has left a step out
                    self._run.count_step()
        finally:
            self._left = begun if self.loader.epoch == begun else None
            self._leave()

    def _bodies(self, step: Any, models: nn.ModuleList) -> Generator[Any, None, None]:
        """The microbatches of a step on this rank."""
        # Every rank runs equally many: where there are too few, one of them again, with weight 0.
        turns = ceil(ceil(step.samples / self.batch_size) / self._accelerator.num_processes)
        self.step, self._losses = step, 0
        self._microbatches = microbatches = step.microbatches(models)
        for turn in range(turns):
            batch = next(microbatches)
            self._accelerator.sync_gradients = turn + 1 == turns
            self.is_running = True
            yield self._to_device(batch)
            self.is_running = False

    def _look_at_optimizer(self, number: int) -> None:
        """Say once that a step had no optimizer's, unless a GradScaler may have left it out."""
        if self._run.has_stepped or self._is_told or self._accelerator.scaler is not None:
            return
        self._is_told = True
        log.warning(
            "step %d: no optimizer has stepped in it: call optimizer.step() and zero_grad() for "
            "each batch, or where accelerator.sync_gradients is true, and not by a count of your "
            "own; the step counts all the same",
            number,
        )

    @property
    def is_within_step(self) -> bool:
        """Whether microbatches were run that no optimizer's step has followed yet."""
        is_counted = self.step is not None and self.loader.step > self.step.number
        return self.is_running and not (self._run.has_stepped or is_counted)

    def _to_device(self, batch: Any) -> Any:
        """A batch where the model is."""
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return batch
        return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)

    def scale(self, loss: Any, weight: Any) -> Any:
        """A microbatch's mean loss, weighted, for its backward.

        Raises:
            ValueError: not within the loop, or the gradients of the step are complete already.
        """
        if not self.is_running:
            raise ValueError(
                "backward outside of the loop over the training DataLoader, which is the first one "
                "that is prepared"
            )
        if self._microbatches is None:
            raise ValueError(
                "backward after the optimizer's step, or after clipping, in the last microbatch "
                "of a step: run all backward passes before. For optimizers that alternate (a GAN), "
                "use anyrank.Checkpoints in a loop of your own"
            )
        self._losses += 1
        return self.step.scale(loss, weight)

    def complete(self) -> bool:
        """Complete the gradients in the last microbatch of a step; whether it is the last.

        Raises:
            ValueError: no backward was run in the step.
        """
        if not self._accelerator.sync_gradients:
            return False
        if self._microbatches is not None:
            microbatches, self._microbatches = self._microbatches, None
            if not self._losses:
                raise ValueError(
                    "a step without accelerator.backward(loss): call it in place of "
                    "loss.backward(), in the loop over the DataLoader that is prepared first, "
                    "which is the one to train on"
                )
            # Ends it: exchanges what no wrapper does, scales, verifies.
            left = next(microbatches, None)
            assert left is None
        return True

    def clips_exactly(self, parameters: list[Any]) -> bool:
        """Whether a step is to clip these: the gradients of all models, with exact=True."""
        if not self._is_exact or self._models is None:
            return False
        trained = {id(p) for p in self._models.parameters() if p.grad is not None}
        return trained == {id(p) for p in parameters if p.grad is not None}

    def clip(self, max_norm: float, norm_type: float) -> Any:
        """Clip all gradients by a norm that has the same bits on any number of ranks."""
        self._accelerator.unscale_gradients()
        return self.step.clip_grad_norm_(max_norm, norm_type)

    def _leave(self) -> None:
        """Drop what a loop leaves that is broken off within a step."""
        self.is_running = False
        self._accelerator.sync_gradients = True
        microbatches, self._microbatches = self._microbatches, None
        if isinstance(microbatches, Generator):
            microbatches.close()
