"""Find slow ranks in a job that only calls `watch`: the store has the medians of each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from anyrank.training.steps.pace import Pace
from anyrank.world.store import Store

FIRST_SEC = 0.1  # between ticks while the first medians of other ranks are missing


class SlowRanks:
    """The paces of ranks: this rank measures and publishes its own; rank 0 compares all.

    The second step shows the model, because the watch may have started within the first step. Does
    nothing if the pace is already measured, for example by `Checkpoints`.

    Args:
        store: the store of the watch.
        rank, size: this rank, and the number of ranks of the job.
        on_first: called when the first window is ready to be published.
    """

    def __init__(self, store: Store, rank: int, size: int, on_first: Callable[[], None]) -> None:
        self._store, self._rank, self._size, self._on_first = store, rank, size, on_first
        self._pace: Pace | None = None
        self._is_due = False  # whether to compare
        self._modules: dict[int, nn.Module] | None = None  # that run in the second step
        self._hook = register_module_forward_pre_hook(self._note_module) if size > 1 else None

    def tick(self) -> bool:
        """Publish and compare; return whether to call again soon. For the watch's thread."""
        if self._pace is None or Pace.running is not self._pace:
            return False
        if window := self._pace.take_window():
            self._store.set(f"pace/{self._rank}", json.dumps(window))
            self._is_due = self._rank == 0
        if not self._is_due:
            return False
        keys = [f"pace/{rank}" for rank in range(self._size)]
        if not self._store.has(keys):
            return True
        self._is_due = False
        windows = self._store.call(lambda store: store.multi_get(keys))
        self._pace.warn_of_slow(range(self._size), [json.loads(window) for window in windows])
        return False

    def step_made(self, optimizer: Optimizer) -> None:
        """Record a step of an optimizer; after the second one, start to time its model."""
        if self._hook is None:
            return
        if self._modules is None:
            self._modules = {}
            return
        self._hook.remove()
        model = find_model([*self._modules.values()], [optimizer])
        self._hook = self._modules = None
        if model is not None and Pace.running is None:
            self._pace = Pace(model, [optimizer], self._on_first)

    def close(self) -> None:
        """Remove all hooks; call it in the training thread, because elsewhere hooks may run."""
        if self._hook is not None:
            self._hook.remove()
        if self._pace is not None:
            self._pace.close()

    def _note_module(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._modules is not None:
            self._modules.setdefault(id(module), module)


def find_model(seen: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> nn.Module | None:
    """Return the outermost module with the largest number of the optimizers' parameters.

    If no module has any, because the optimizers are stale, return that with the most gradients.
    """
    inner = {id(part) for module in seen for part in module.modules() if part is not module}
    stepped = parameters_of(optimizers)

    def score(module: nn.Module) -> tuple[int, int]:
        parameters = [*module.parameters()]
        with_gradient = sum(p.grad is not None for p in parameters)
        return sum(id(p) in stepped for p in parameters), with_gradient

    outermost = [module for module in seen if id(module) not in inner]
    best = max(outermost, key=score, default=None)
    return best if best is not None and any(score(best)) else None


def parameters_of(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the ids of the parameters in optimizers."""
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
