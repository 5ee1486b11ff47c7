"""Accelerate: an Accelerator whose run goes on on any number of ranks, in the loop as it is.

Tested with accelerate 1.15.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader

import anyrank
from anyrank.integrations.accelerate_batches import ElasticBatches
from anyrank.integrations.accelerate_run import (
    AccelerateRun,
    add_modules,
    check_unsharded,
    make_state,
    problems_of,
    step_as_trained,
    warn_of_other_schedule,
)
from anyrank.versions import warn_if_untested

log = logging.getLogger("anyrank.integrations")
warn_if_untested("accelerate", "1.15", "1.15")

_Accelerator: Any = accelerate.Accelerator  # its own annotations are too loose for a checker


class Accelerator(_Accelerator):
    """An Accelerator that saves a run and resumes it on any number of ranks. Every rank makes one.

    The loop stays as it is: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `save_state`,
    `load_state`, `register_for_checkpointing`. The first DataLoader that is prepared is trained on.
    It yields this rank's microbatches, of its batch_size, and `sync_gradients` is true in the last
    of each step of `global_batch` samples. Order and random numbers depend on (seed, step,
    microbatch) alone. `backward` weights the losses, so that gradients are those of the mean over
    the global batch. A prepared scheduler steps once in each optimizer step.

    The training DataLoader's `len` is the number of optimizer steps in an epoch, equal on any
    number of ranks, and an iteration is an epoch: those that were finished before a resume yield
    nothing. Other DataLoaders are prepared as usual. For one process, DDP and FSDP2.

    Args:
        args: of accelerate's Accelerator, as are `kwargs`.
        folder: path or URL of the run.
        global_batch: samples of an optimizer step, on all ranks together, in place of
            gradient_accumulation_steps.
        microbatch: samples of one forward pass; default: the DataLoader's batch_size.
        seed: of the order of the data and of all random numbers.
        exact: the same bits on any number of ranks, as `ElasticLoader(exact=True)` gives them.
        every: when to save, as for `anyrank.Checkpoints`; keep, keep_every, background and verify
            are its arguments, too.

    Raises:
        ValueError: gradient_accumulation_steps, split_batches, a limit of checkpoints, DeepSpeed,
            FSDP1 or another sharding beside it.

    Example::

        from torch.utils.data import DataLoader

        accelerator = anyrank.integrations.accelerate.Accelerator(
            cpu=True, folder="runs/a", global_batch=8
        )
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(torch.randn(32, 4), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.load_state()  # nothing yet
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()
        assert (accelerator.run.step, accelerator.run.samples) == (4, 32)
    """

    def __init__(
        self,
        *args: Any,
        folder: str | os.PathLike[str],
        global_batch: int,
        microbatch: int | None = None,
        seed: int = 0,
        exact: bool = False,
        every: int | str | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        background: bool = False,
        verify: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("gradient_accumulation_steps", 1) == 1:
            # adjust_scheduler would count microbatches, whose number depends on the ranks.
            plugin = GradientAccumulationPlugin(num_steps=1, adjust_scheduler=False)
            kwargs.setdefault("gradient_accumulation_plugin", plugin)
        super().__init__(*args, **kwargs)
        for problem in problems_of(self):
            raise ValueError(f"anyrank's Accelerator: {problem}")
        self._data: dict[str, Any] = {"global_batch": global_batch, "microbatch": microbatch}
        self._data |= {"seed": seed, "exact": exact}
        options = {"every": every, "keep": keep, "keep_every": keep_every}
        options |= {"background": background, "verify": verify}
        self._elastic = AccelerateRun(os.fspath(folder), self._make_state, options)
        self._batches: ElasticBatches | None = None
        self._wrapped: list[nn.Module] = []  # accelerate's own list has them without DDP

    @property
    def run(self) -> anyrank.TrainState | None:
        """The state of the run, with step, samples and epoch; None before it is needed first."""
        return self._elastic.state

    @property
    def report(self) -> anyrank.ResumeReport | None:
        """What `load_state` resumed; None if there was nothing."""
        return self._elastic.report

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As usual."""
        prepared = super().prepare(*args, **kwargs)
        add_modules(self._wrapped, prepared if isinstance(prepared, tuple) else [prepared])
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The first one is trained on, and becomes elastic; others are prepared as usual."""
        if self._batches is not None or not isinstance(data_loader, DataLoader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        self._batches = ElasticBatches(self, self._elastic, data_loader, **self._data)
        return self._batches

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As usual; a model that is sharded already is refused with a ValueError."""
        if not self.is_fsdp2:
            check_unsharded(model)
        prepared = super().prepare_model(model, *args, **kwargs)
        add_modules(self._wrapped, [prepared])
        return prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As usual; its step completes the gradients, and counts."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._elastic.note_step)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As usual; it steps once in each optimizer step, not once for each process."""
        return step_as_trained(super().prepare_scheduler(scheduler), self._elastic)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As usual; for the training DataLoader it is refused with a ValueError."""
        if dataloader is self._batches:
            raise ValueError(
                "skip_first_batches() of the training DataLoader: load_state() has restored its "
                "position, and batches that are skipped by hand would be lost: remove the call"
            )
        return super().skip_first_batches(dataloader, num_batches)

    def prepared_models(self) -> nn.ModuleList:
        """What is trained, as `prepare` has wrapped it."""
        return nn.ModuleList(self._wrapped)

    def _make_state(self) -> anyrank.TrainState:
        return make_state(
            self._wrapped,
            self._optimizers,
            self._schedulers,
            self._custom_objects,
            scaler=self.scaler,
            data=self._training().loader,
            seed=self._data["seed"],
        )

    # -- the loop's body --------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """As usual; the DataLoader decides when gradients are exchanged."""
        self._training()
        return nullcontext()

    def backward(self, loss: torch.Tensor, weight: Any = None, **kwargs: Any) -> None:
        """Run backward of a microbatch's mean loss, weighted.

        Args:
            loss: one value, the mean over this microbatch.
            weight: the number of units of that mean, tokens for instance; default: its samples.
            kwargs: of `Tensor.backward`.

        Raises:
            ValueError: not within the loop over the training DataLoader, or after the optimizer's
                step in the same microbatch.
        """
        super().backward(self._training().scale(loss, weight), **kwargs)

    def step_loss(self) -> float:
        """The mean loss of the step so far, over the microbatches of all ranks. All ranks call."""
        return self._training().step.loss()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As usual in a step's last microbatch; nothing in those before."""
        if self._complete_gradients():
            super().unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """As usual in a step's last microbatch; nothing, and a norm of 0, in those before."""
        if not self._complete_gradients():
            return torch.zeros(())
        given = list(parameters)
        if self._batches is not None and self._batches.clips_exactly(given):
            return self._batches.clip(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """As usual in a step's last microbatch; nothing in those before."""
        if self._complete_gradients():
            super().clip_grad_value_(parameters, clip_value)

    def _training(self) -> ElasticBatches:
        if self._batches is None:
            raise ValueError(
                "no DataLoader was prepared: prepare() the one to train on before all others, "
                "together with the model and the optimizer"
            )
        return self._batches

    def _complete_gradients(self) -> bool:
        """Complete the gradients in the last microbatch of a step; whether it is the last."""
        return self._batches is None or self._batches.complete()

    def _before_step(self, *_: Any) -> None:
        self._complete_gradients()

    # -- the run ----------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str | None:
        """Save the run now, after an optimizer step. All ranks.

        Args:
            output_dir: not used: the step is saved in the run's folder, and a line says so.
            args: not used, as are `kwargs`.

        Returns:
            The path of the step.

        Raises:
            ValueError: within a step.
            CheckpointError: as `Checkpoints.save`.
        """
        if self._training().is_within_step:
            raise ValueError(
                "save_state() within a step: call it after optimizer.step(), where "
                "accelerator.sync_gradients is true"
            )
        path = self._elastic.save()
        if output_dir is not None:
            log.warning("save_state(%r): the run is saved in %s", str(output_dir), path)
        return path

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Resume the run, after `prepare` and `register_for_checkpointing`. All ranks.

        Args:
            input_dir: None for the newest step, or for a new run where the folder is empty;
                "must", where an empty folder is an error; a step, or its path; or the path of
                what Accelerate or another tool saved, with which this run begins.
            args: not used, as are `kwargs`.

        Raises:
            CheckpointError: as `Checkpoints.resume`.
        """
        self._elastic.load(input_dir)
        for scheduler in self._schedulers:
            warn_of_other_schedule(scheduler.scheduler)

    def end_training(self) -> None:
        """As usual, after the last step is saved. All ranks."""
        self._elastic.close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """As usual, after the last step is saved: what is prepared next is another run's."""
        self._elastic.close()
        self._elastic.state = self._batches = None  # which hold the model
        self._wrapped = []
        return super().free_memory(*objects)
