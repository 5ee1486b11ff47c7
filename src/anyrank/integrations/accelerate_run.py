"""The run of an anyrank Accelerator: its parts, its steps, its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import anyrank

log = logging.getLogger("anyrank.integrations")

OTHER_SHARDINGS = ("DEEPSPEED", "MEGATRON_LM", "XLA")


class AccelerateRun:
    """The checkpoints of a run whose parts an Accelerator prepares.

    Args:
        folder: path or URL of the run.
        make_state: called when the checkpoints are needed first.
        options: of `anyrank.Checkpoints`.

    Attributes:
        state: the run's, once made.
        report: what was resumed; None if there was nothing.
        has_stepped: whether the optimizer has, in a step that is not counted yet.
        is_in_finished_epoch: whether the loop over epochs is in one that was finished before.
    """

    def __init__(
        self, folder: str, make_state: Callable[[], anyrank.TrainState], options: dict[str, Any]
    ) -> None:
        self.state: anyrank.TrainState | None = None
        self.report: anyrank.ResumeReport | None = None
        self.has_stepped = self.is_in_finished_epoch = False
        self._folder = folder
        self._make_state = make_state
        self._options = options
        self._checkpoints: anyrank.Checkpoints | None = None
        self._is_resumed = False  # or its folder was empty

    def _open(self) -> anyrank.Checkpoints:
        if self._checkpoints is None:
            self.state = self._make_state()
            self._checkpoints = anyrank.Checkpoints(self._folder, self.state, **self._options)
        return self._checkpoints

    def note_step(self, *_: Any) -> None:
        """A hook of the optimizer: it has stepped."""
        self.has_stepped = True

    def begin_pass(self) -> None:
        """Before an epoch: count the last step of the one before, and never overwrite a run.

        Raises:
            ValueError: the folder holds a run that was not resumed.
        """
        checkpoints = self._open()
        if not self._is_resumed and checkpoints.latest() is not None:
            raise ValueError(
                f"{self._folder} holds a run: call accelerator.load_state() before the loop, which "
                "also begins a run where there is none, or give another folder"
            )
        self._is_resumed = True
        self.count_step()

    def count_step(self) -> None:
        """Count the step whose optimizer has stepped, and save when due. All ranks."""
        if self.has_stepped:
            self.has_stepped = False
            self._open().step_done()

    def save(self) -> str | None:
        """Save after an optimizer step; the path of the step. All ranks."""
        self.count_step()
        checkpoints = self._open()
        checkpoints.save()
        return checkpoints.latest()

    def load(self, given: Any) -> None:
        """Resume what `load_state` was given. All ranks."""
        self.report = self._open().resume("auto" if given is None else given)
        self._is_resumed = True

    def close(self) -> None:
        """Save the last step that was trained, if one was, and release the folder. All ranks.

        The state stays: its counts are asked for after the end.
        """
        if self._checkpoints is not None and self.state is not None:
            self.count_step()
            if self.state.step:
                self._checkpoints.save(unless_saved=True)
            self._checkpoints.close()
        self._checkpoints = None
        self._is_resumed = False


def add_modules(known: list[nn.Module], things: Iterable[Any]) -> None:
    """Add the modules among things to a list, each once."""
    for thing in things:
        if isinstance(thing, nn.Module) and all(thing is not module for module in known):
            known.append(thing)


def check_unsharded(model: Any) -> None:
    """Refuse a model that is sharded already, which `prepare` would wrap again.

    Raises:
        ValueError: it is an FSDP2 module.
    """
    if isinstance(model, FSDPModule):
        raise ValueError(
            "prepare() got a model that fully_shard has sharded, and would wrap it again: leave "
            "the sharding to FullyShardedDataParallelPlugin(fsdp_version=2), or use "
            "anyrank.Checkpoints in a loop of your own"
        )


def make_state(
    models: list[nn.Module],
    optimizers: list[Any],
    schedulers: list[Any],
    registered: list[Any],
    **parts: Any,
) -> anyrank.TrainState:
    """What an Accelerator has prepared, as the state of a run.

    Raises:
        ValueError: no model was prepared, or a scheduler was registered.
    """
    if not models:
        raise ValueError("prepare() the model, the optimizer and the training DataLoader before")
    for thing in registered:
        # It would step in each microbatch, whose number depends on the ranks, and once more at the
        # end of each epoch that was finished before.
        if isinstance(thing, LRScheduler):
            raise ValueError(
                f"register_for_checkpointing({type(thing).__name__}): give the scheduler to "
                "prepare(), which saves it as well and lets it step once in each optimizer step: "
                "scheduler = accelerator.prepare(scheduler)"
            )
    _warn_of_unprepared(optimizers, schedulers)
    custom = _numbered("registered", registered)
    stateful = [k for k, thing in custom.items() if not isinstance(thing, (nn.Module, Optimizer))]
    return anyrank.TrainState(
        first_rank=stateful,
        **_numbered("model", models),
        **_numbered("optimizer", optimizers),
        **_numbered("scheduler", schedulers),
        **custom,
        **parts,
    )


def _warn_of_unprepared(optimizers: list[Any], schedulers: list[Any]) -> None:
    """Log a line where an optimizer has a scheduler that no run can hold."""
    prepared = {id(scheduler.scheduler.optimizer) for scheduler in schedulers}
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if getattr(inner.step, "_wrapped_by_lr_sched", False) and id(inner) not in prepared:
            log.warning(
                "%s has a learning rate scheduler that was not prepared: it is not saved, and its "
                "steps depend on the number of ranks: give it to prepare()",
                type(inner).__name__,
            )


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """Parts of a state by name: optimizer, optimizer_1, ..."""
    return {f"{name}_{number}" if number else name: thing for number, thing in enumerate(things)}


def step_as_trained(scheduler: Any, run: AccelerateRun) -> Any:
    """Let a prepared scheduler step once for what is trained, not for each process, and not at the
    ends of epochs that were finished before.
    """
    scheduler.split_batches = True
    step = scheduler.step

    def unless_finished(*args: Any, **kwargs: Any) -> None:
        if not run.is_in_finished_epoch:
            step(*args, **kwargs)

    scheduler.step = unless_finished
    return scheduler


def warn_of_other_schedule(scheduler: Any) -> None:
    """Log a line if a LambdaLR, whose function is not saved, is not that of the run."""
    if type(scheduler) is not LambdaLR:
        return
    step, saved = scheduler.last_epoch, scheduler.get_last_lr()
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    here = [base * function(step) for base, function in rates]
    if any(abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(here, saved, strict=True)):
        log.warning(
            "the learning rate was %s at step %d, and the schedule that was prepared gives %s: is "
            "its length another? It counts optimizer steps on any number of ranks, so it is not to "
            "be multiplied by num_processes, nor divided by it",
            saved,
            step,
            here,
        )


def problems_of(accelerator: Any) -> Iterator[str]:
    """What divides the data or the model in a second way."""
    kind, project = accelerator.distributed_type.name, accelerator.project_configuration
    if accelerator.gradient_accumulation_steps != 1:
        yield "global_batch decides how much is accumulated: leave gradient_accumulation_steps out"
    if accelerator.split_batches:
        yield "split_batches divides a batch among the ranks a second time: leave it out"
    if project.total_limit is not None or project.automatic_checkpoint_naming:
        yield (
            "total_limit and automatic_checkpoint_naming are for folders of Accelerate's own: "
            "leave them out, and give keep="
        )
    if kind in OTHER_SHARDINGS or (kind == "FSDP" and not accelerator.is_fsdp2):
        yield (
            f"{kind} shards the model in a way that is not resumed: use DDP, or FSDP2 with "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if accelerator.parallelism_config is not None:
        yield (
            "parallelism_config gives several ranks the same data: use anyrank.Checkpoints in a "
            "loop of your own"
        )
