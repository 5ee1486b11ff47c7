"""An Accelerator of Accelerate whose run continues on any number of ranks, in an unchanged loop.

Tested with accelerate 1.15.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import anyrank
from anyrank.integrations.accelerate_batches import ElasticBatches
from anyrank.integrations.framework_names import check_names
from anyrank.integrations.run import FrameworkRun, RunOptions, numbered

log = logging.getLogger("anyrank.integrations")

_Accelerator: Any = accelerate.Accelerator  # its own annotations are too loose for a checker
check_names("accelerate")

OTHER_SHARDINGS = ("DEEPSPEED", "MEGATRON_LM", "XLA")


class Accelerator(_Accelerator):
    """An Accelerator that saves a run and resumes it on any number of ranks.

    Every rank must create one. The training loop is unchanged. The first DataLoader that is
    prepared is the training data: it yields this rank's microbatches, its `len` is the number of
    optimizer steps in an epoch, and epochs that were complete before a resume yield nothing. Works
    with one process, DDP and FSDP2; the page on Accelerate in the documentation lists how each
    method differs from Accelerate's own.

    Args:
        args: arguments of accelerate's Accelerator.
        folder: path or URL of the run.
        global_batch: samples of an optimizer step, on all ranks together, in place of
            gradient_accumulation_steps.
        kwargs: options of the run, such as `every="10min"` (see
            `anyrank.integrations.run.RunOptions`); the rest are passed to accelerate's Accelerator.

    Raises:
        ValueError: gradient_accumulation_steps, split_batches, total_limit, or a sharding other
            than FSDP2.

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
        self, *args: Any, folder: str | os.PathLike[str], global_batch: int, **kwargs: Any
    ) -> None:
        names = RunOptions.__annotations__.keys() & kwargs.keys()
        options = {name: kwargs.pop(name) for name in names}
        if kwargs.get("gradient_accumulation_steps", 1) == 1:
            # adjust_scheduler would count microbatches, whose number depends on the rank count.
            plugin = GradientAccumulationPlugin(num_steps=1, adjust_scheduler=False)
            kwargs.setdefault("gradient_accumulation_plugin", plugin)
        super().__init__(*args, **kwargs)
        problem = next(_problems_of(self), None)
        if problem is not None:
            raise ValueError(f"anyrank's Accelerator: {problem}")
        self._run = FrameworkRun(
            folder, self._make_state, global_batch=global_batch, say=self.print, **options
        )
        self._batches: ElasticBatches | None = None
        self._wrapped: list[nn.Module] = []  # accelerate's own list has them without DDP

    @property
    def run(self) -> anyrank.TrainState | None:
        """The state of the run, with step, samples and epoch; None until its first use."""
        return self._run.state

    @property
    def report(self) -> anyrank.ResumeReport | None:
        """The report of the last `load_state`; None if there was nothing to resume."""
        return self._run.report

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerate does."""
        prepared = super().prepare(*args, **kwargs)
        self._add_modules(prepared if isinstance(prepared, tuple) else [prepared])
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a DataLoader; the first one is the training data, and becomes elastic."""
        if self._batches is not None or not isinstance(data_loader, DataLoader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        self._batches = ElasticBatches(self, self._run, data_loader)
        return self._batches

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does; raise ValueError if it is already sharded."""
        if not self.is_fsdp2 and isinstance(model, FSDPModule):
            raise ValueError(
                "prepare() would wrap this model again, because fully_shard has already sharded "
                "it. Leave the sharding to FullyShardedDataParallelPlugin(fsdp_version=2), or use "
                "anyrank.Checkpoints in your own training loop"
            )
        prepared = super().prepare_model(model, *args, **kwargs)
        self._add_modules([prepared])
        return prepared

    def _add_modules(self, things: Iterable[Any]) -> None:
        """Remember the modules among these things, each once."""
        for thing in things:
            if isinstance(thing, nn.Module) and all(thing is not part for part in self._wrapped):
                self._wrapped.append(thing)

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer as Accelerate does; its step completes the gradients and counts."""
        if not isinstance(optimizer, AcceleratedOptimizer):  # otherwise it is already prepared
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._run.note_step)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler as Accelerate does; it steps once per optimizer step.

        It does not step once per process, nor at the ends of epochs that are already complete.
        """
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        step = prepared.step

        def unless_finished(*args: Any, **kwargs: Any) -> None:
            batches = self._batches
            if batches is None or not batches.is_in_finished_epoch:
                step(*args, **kwargs)
            if batches is not None:
                batches.unstepped.discard(id(prepared))

        prepared.step = unless_finished
        return prepared

    @property
    def _awaits_schedule(self) -> bool:
        """Whether an epoch's loop is over and an epoch scheduler has not stepped for it yet."""
        return self._run.is_held and bool(self._training().unstepped)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches as Accelerate does; raise ValueError for the training DataLoader."""
        if dataloader is self._batches:
            raise ValueError(
                "skip_first_batches() was called with the training DataLoader, whose position "
                "load_state() has already restored; skipped batches would be lost. Remove the call"
            )
        return super().skip_first_batches(dataloader, num_batches)

    def prepared_models(self) -> nn.ModuleList:
        """Return the trained models, with the wrappers of `prepare`."""
        return nn.ModuleList(self._wrapped)

    def _make_state(self) -> anyrank.TrainState:
        """Make the state of a run from all prepared and registered objects.

        Raises:
            ValueError: no model or no optimizer was prepared, or a scheduler was registered.
        """
        if not self._wrapped or not self._optimizers:
            missing = "optimizer" if self._wrapped else "model"
            raise ValueError(
                f"no {missing} was prepared. First pass the model, the optimizer and the training "
                "DataLoader to prepare()"
            )
        registered = self._custom_objects
        for thing in registered:
            # It would step in each microbatch, whose number depends on the rank count, and again
            # at the end of each epoch that is already complete.
            if isinstance(thing, LRScheduler):
                raise ValueError(
                    f"register_for_checkpointing() got a scheduler ({type(thing).__name__}). Pass "
                    "it to prepare() instead, which also saves it and lets it step once per "
                    "optimizer step: scheduler = accelerator.prepare(scheduler)"
                )
        custom = numbered("registered", registered)
        whole = (nn.Module, Optimizer)
        return anyrank.TrainState(
            scaler=self.scaler,
            data=self._training().loader,
            seed=self._run.seed,
            first_rank=[name for name, thing in custom.items() if not isinstance(thing, whole)],
            **numbered("model", self._wrapped),
            **numbered("optimizer", self._optimizers),
            **numbered("scheduler", self._schedulers),
            **custom,
        )

    # -- the loop's body --------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: the DataLoader decides when gradients are synchronized."""
        self._training()
        return nullcontext()

    def backward(self, loss: torch.Tensor, weight: Any = None, **kwargs: Any) -> None:
        """Run backward of a microbatch's mean loss, weighted.

        Args:
            loss: a scalar, the mean over this microbatch.
            weight: the number of units of that mean, such as tokens; default: its samples.
            kwargs: arguments of `Tensor.backward`.

        Raises:
            ValueError: outside the loop over the training DataLoader, or after the optimizer's
                step in the same microbatch.
        """
        super().backward(self._training().scale(loss, weight), **kwargs)

    def step_loss(self) -> float:
        """Return the mean loss of the step so far, over the microbatches of all ranks.

        Collective: every rank must call it.
        """
        return self._training().step.loss()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients in a step's last microbatch; do nothing in earlier ones."""
        if self._complete_gradients():
            super().unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients in a step's last microbatch; in earlier ones, return 0."""
        if not self._complete_gradients():
            return torch.zeros(())
        clipped = list(parameters)
        if self._batches is not None and self._batches.clips_exactly(clipped):
            return self._batches.clip(max_norm, norm_type)
        return super().clip_grad_norm_(clipped, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip gradients in a step's last microbatch; do nothing in earlier ones."""
        if self._complete_gradients():
            super().clip_grad_value_(parameters, clip_value)

    def _training(self) -> ElasticBatches:
        if self._batches is None:
            raise ValueError(
                "no DataLoader was prepared. Pass the training DataLoader to prepare() before any "
                "other, together with the model and the optimizer"
            )
        return self._batches

    def _complete_gradients(self) -> bool:
        """Complete the gradients in a step's last microbatch; return True if this is the last."""
        return self._batches is None or self._batches.complete()

    def _before_step(self, *_: Any) -> None:
        self._complete_gradients()

    # -- the run ----------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str | None:
        """Save the run now, after an optimizer step.

        Collective: every rank must call it.

        Args:
            output_dir: not used; the step is saved in the run's folder, and a log line says so.
            args: not used, and neither are `kwargs`.

        Returns:
            The path of the step; with background=True, of the newest committed step.

        Raises:
            ValueError: in the middle of a step.
            CheckpointError: as for `Checkpoints.save`.
        """
        if self._training().is_within_step:
            raise ValueError(
                "save_state() was called in the middle of a step. Call it after optimizer.step(), "
                "when accelerator.sync_gradients is True"
            )
        if self._awaits_schedule:
            log.warning(
                "save_state() was called before the epoch's scheduler.step(); a resume continues "
                "with the next epoch, and loses that scheduler step. Call scheduler.step() first"
            )
        path = self._run.save()
        if output_dir is not None:
            log.warning("save_state(%r): the run is saved in %s", str(output_dir), path)
        return path

    def load_state(
        self,
        input_dir: Any = None,
        *args: Any,
        skip: Sequence[str] = (),
        fresh: Sequence[str] = (),
        drop: Sequence[str] = (),
        rename: Any = None,
        parts: Any = None,
        epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Resume the run, after `prepare` and `register_for_checkpointing`.

        Collective: every rank must call it.

        Args:
            input_dir: None for the newest step, or for a new run if the folder is empty; "must" to
                raise an error for an empty folder; a step, or its path; or the path of a
                checkpoint of another tool, such as Accelerate, from which this run starts.
            skip, fresh, drop, rename, parts, epoch: as for `Checkpoints.resume`; registered objects
                are called `registered`, `registered_1` and so on, in the order of the calls.
            args: not used, and neither are `kwargs`.

        Raises:
            CheckpointError: as for `Checkpoints.resume`.
        """
        which = "auto" if input_dir is None else input_dir
        foreign = {"rename": rename, "parts": parts, "epoch": epoch}
        self._run.resume(which, skip=skip, fresh=fresh, drop=drop, **foreign)

    def end_if_asked(self) -> None:
        """Stop the run now if any rank has received SIGTERM; the last complete step is saved.

        Collective: every rank must call it the same number of times. Call it after each batch of a
        long evaluation. It does nothing if an epoch's loop is over and a prepared scheduler has not
        stepped since the epoch started, because a save would lose that scheduler step.

        Raises:
            SystemExit: SIGTERM was received.
        """
        if self._batches is None or not self._awaits_schedule:
            self._run.end_if_asked()

    def end_training(self) -> None:
        """Save the last step, and end the training as Accelerate does. Collective."""
        self._run.close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Save the last step, and free memory as Accelerate does. Collective.

        Objects that are prepared afterwards belong to a different run.
        """
        self._run.close()
        self._run.state = self._run.checkpoints = self._run.loader = None  # they hold the model
        self._batches = None
        self._wrapped = []
        return super().free_memory(*objects)


def _problems_of(accelerator: Any) -> Iterator[str]:
    """Yield the options that would divide the data or the model a second time."""
    kind, project = accelerator.distributed_type.name, accelerator.project_configuration
    if accelerator.gradient_accumulation_steps != 1:
        yield "remove gradient_accumulation_steps; global_batch determines the accumulation"
    if accelerator.split_batches:
        yield "split_batches divides a batch among the ranks a second time. Remove it"
    if project.total_limit is not None or project.automatic_checkpoint_naming:
        yield (
            "total_limit and automatic_checkpoint_naming apply only to Accelerate's own "
            "checkpoints. Remove them, and set keep="
        )
    if kind in OTHER_SHARDINGS or (kind == "FSDP" and not accelerator.is_fsdp2):
        yield (
            f"{kind} is not supported, because its sharding cannot be resumed. Use DDP, or FSDP2 "
            "with FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if accelerator.parallelism_config is not None:
        yield (
            "parallelism_config is not supported: several ranks would need the same data. Use "
            "anyrank.Checkpoints in your own training loop"
        )
