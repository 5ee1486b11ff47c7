"""One recomputed region: torch's checkpoint around inputs that are saved once.

`torch.utils.checkpoint` receives a function without arguments. Its first run is the caller's call;
later runs call the function on the saved inputs. One autograd node saves all tensors of a call
before the function runs, and the tiles of the call share it. So the saved-tensor hooks around a
region see only its inputs, and an outer region that is recomputed for the inputs stops there: a
tile inside it runs twice, not three times.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from anyrank.errors import RecomputeError
from anyrank.memory.ambient import Ambient
from anyrank.memory.call import Call
from anyrank.memory.used_modules import UsedModules, changed_error, describe_tensor
from anyrank.tensors.sharded_tensor import version_of

P = ParamSpec("P")
R = TypeVar("R")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Pack = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]

# Compared once: a comparison of versions takes 0.1 ms, and a call has many regions.
SAVES_ITS_OWN = torch.__version__ < "2.12"


def record_region(
    first_run: Callable[[], R],
    again: Callable[[list[torch.Tensor]], Any],
    inputs: SavedInputs,
    ambient: Ambient,
    used: UsedModules,
    *,
    tile_index: int = 0,
    context_fn: Callable[[], Contexts] | None = None,
) -> R:
    """Run a function once, and again in backward.

    Args:
        first_run: the caller's call; not kept.
        again: runs the function on the inputs' tensors, detached from the graph.
        inputs, ambient, used: the function's inputs, its random state and its modules.
        tile_index: the region's number among those that share the inputs.
        context_fn: as for torch's checkpoint.
    """
    waiting = [first_run]
    random, buffers = ambient.random(), used.values()

    def run() -> R:
        if waiting:
            return waiting.pop()()
        tensors = inputs.take_for_tile(tile_index)
        before = ambient.random()
        try:
            ambient.put(random)
            with ambient.autocast(), used.checked(), used.restored(buffers):
                return again(tensors)
        finally:
            ambient.put(before)

    del first_run
    options: dict[str, Any] = {"context_fn": context_fn} if context_fn else {}
    with _without_torchs_own():
        result: R = checkpoint(run, use_reentrant=False, preserve_rng_state=False, **options)
    used.check_first_run()
    return result


def _without_torchs_own() -> AbstractContextManager[Any]:
    """Hide from an outer region the empty tensor that torch 2.11 saves for each region.

    Otherwise the outer region would be recomputed for it. The hooks of checkpoint override these
    while the function runs. Later versions save no such tensor, and from 2.14 warn about hooks
    around a selective policy.
    """
    if not SAVES_ITS_OWN:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _SaveInputs(torch.autograd.Function):
    """An autograd node that saves tensors for backward and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> None:
        raise AssertionError("the result of _SaveInputs is never used")


class SavedInputs:
    """Tensors of one call, kept until the graph dies: by autograd, an offload or an outer region.

    Args:
        call: the call, which drops its tensors.
        label: the call, for messages.
        pack: moves the tensors away and returns the function that restores them; None keeps them
            as saved tensors of the graph.
    """

    def __init__(self, call: Call, label: str, pack: Pack | None = None) -> None:
        self.call = call
        self.label = label
        self.grads = [tensor.requires_grad for tensor in call.tensors]
        self.recorded = [(weakref.ref(tensor), version_of(tensor)) for tensor in call.tensors]
        self.shared: list[torch.Tensor] | None = None
        if pack is not None:
            self.restore = pack(call.tensors)
        else:
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            # The output keeps the node's tensors; before torch 2.13 its `grad_fn` does not.
            saved: Any = _SaveInputs.apply(anchor, *call.tensors)
            self.restore = lambda: list(saved.grad_fn.saved_tensors)
        call.drop_tensors()

    def _changed(self) -> tuple[int, torch.Tensor] | None:
        """Return the number and tensor of the first in-place change since the call, or None."""
        for number, (alive, version) in enumerate(self.recorded):
            tensor = alive()
            if tensor is not None and version_of(tensor) != version:
                return number, tensor
        return None

    def check_first_run(self) -> None:
        """Check that the function, which must run twice, has not changed its arguments.

        Raises:
            RecomputeError: it has; the error names the argument.
        """
        if change := self._changed():
            raise RecomputeError(
                f"{self.label} modifies its argument {self.call.tensor_name(change[0])} in place, "
                "so recomputation would start from the modified values. Clone the argument inside "
                "the function, or use the out-of-place operation"
            )

    def take_for_tile(self, tile_index: int) -> list[torch.Tensor]:
        """Return the tensors for a tile, detached from the graph, with `requires_grad` as before.

        They are shared until tile 0, which backward reaches last, because saved tensors may be read
        only once.

        Raises:
            RecomputeError: a tensor was changed in place after the call.
        """
        try:
            tensors = self.shared or self.restore()
        except RuntimeError as error:  # autograd compares versions too
            if change := self._changed():
                name = self.call.tensor_name(change[0])
                how = f"{name}, {describe_tensor(change[1])}, was changed in place"
                raise changed_error(self.label, how) from error
            raise
        self.shared = tensors if tile_index > 0 else None
        return [
            tensor.detach().requires_grad_(grad)
            for tensor, grad in zip(tensors, self.grads, strict=True)
        ]


def uncompiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function and everything that it calls.

    A compiled model whose graph breaks at a region runs that part eagerly, and would compile each
    small function here separately. Does not import the compiler.
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return _disabled(fn)(*args, **kwargs)
        return fn(*args, **kwargs)

    return run


@functools.cache
def _disabled(fn: Callable[P, R]) -> Callable[P, R]:
    return torch.compiler.disable()(fn)
