"""Accelerate's wrappers of optimizers and schedulers: a run saves what they wrap."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def unwrapped(name: str, part: Any) -> Any:
    """Return a part of a training state without the wrapper that `accelerator.prepare` gave it.

    Raises:
        ValueError: a scheduler steps once per process, so that its count, and the learning rate,
            would depend on the number of ranks.
    """
    bases = type(part).__mro__
    wrappers = {b.__name__ for b in bases if b.__module__.partition(".")[0] == "accelerate"}
    if "AcceleratedOptimizer" in wrappers:
        return unwrapped(name, part.optimizer)
    if "AcceleratedScheduler" not in wrappers:
        return part
    if part.step_with_optimizer and not part.split_batches:
        raise ValueError(
            f"{name} is an AcceleratedScheduler that steps once per process, so the learning rate "
            "would depend on the number of ranks. Do not pass the scheduler to "
            "accelerator.prepare(), and step it once per optimizer step; or prepare it with "
            "Accelerator(step_scheduler_with_optimizer=False)."
        )
    return part.scheduler


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that look like one."""
    inner: Any = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer
