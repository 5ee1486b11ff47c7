"""One recomputed region: runs a function, saves nothing of it, runs it again when backward asks.

The tensors that the function saves for backward are replaced by holders. The first holder that
backward opens runs the function again, up to the last tensor that it saved; each value is given out
once and dropped, and none outlives the backward pass. So any number of backward passes, tensors
that are read twice, and regions inside of regions need no further rule: what is not there is
computed again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.module_state import ModuleState
from anyrank.memory.saved_inputs import Inputs
from anyrank.tensors.sharded_tensor import version_of

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


SAME_AGAIN = (
    "it must do the same both times, so it may not depend on a counter, a key-value cache "
    "(transformers: use_cache=False) or another state that changes in between"
)


class Enough(BaseException):
    """Ends a recomputation when all is there; no error, so `except Exception` does not see it."""


class Holder:
    """Stands for one saved tensor in the graph."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


class Region:
    """State of one call. It hangs on the holders, and dies with the graph.

    Args:
        again: runs the function on the tensors of the inputs, cut off from the graph.
        inputs: what it starts from; `reader` is the region's number among those that share them.
        surroundings: those that the function sees, first and again.
        state: tensors of its modules, likewise.
        contexts: one context for the first run and one for the others (selective policies).
    """

    def __init__(
        self,
        again: Callable[[Sequence[torch.Tensor]], Any],
        inputs: Inputs,
        surroundings: AmbientState,
        state: ModuleState,
        *,
        reader: int = 0,
        contexts: Contexts | None = None,
    ) -> None:
        self.again = again
        self.inputs = inputs
        self.surroundings = surroundings
        self.state = state
        self.reader = reader
        self.contexts = contexts or (contextlib.nullcontext(), contextlib.nullcontext())
        self.holders: list[weakref.ref[Holder]] = []
        self.kinds: list[Kind] = []
        self.values: dict[int, tuple[torch.Tensor, int]] = {}
        self.lock = threading.RLock()  # backward has a thread for each device

    @property
    def label(self) -> str:
        return self.inputs.label

    def run(self, first: Callable[[], Any]) -> Any:
        """The first run, on the tensors that carry the graph."""
        with saved_tensors_hooks(self.pack, self.unpack), self.contexts[0]:
            result = first()
        self.state.settle()
        return result

    def pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(len(self.kinds))
        self.holders.append(weakref.ref(holder))
        self.kinds.append(Kind(tensor))
        return holder

    def unpack(self, holder: Holder) -> torch.Tensor:
        with self.lock:
            if holder.index not in self.values:
                self.recompute()
            value, saved_at = self.values.pop(holder.index)
        if version_of(value) != saved_at:
            raise RecomputeError(
                f"{self.label} changes a {self.kinds[holder.index]} in place after an operation "
                "has saved it for backward: use the operation that returns a new tensor"
            )
        return value

    def recompute(self) -> None:
        """Fill the values of all holders that are alive."""
        count = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            if count == len(self.holders):  # a bare `except:` of the function has caught it
                raise Enough
            # Cut off, or the graph of this run would hold itself in a circle.
            value = tensor.detach()
            if self.holders[count]() is not None:
                self.kinds[count].check(tensor, self.label)
                self.values[count] = (value, version_of(value))
            count += 1
            if count == len(self.holders):
                raise Enough
            return value

        clear_after_backward(self)
        clear_after_backward(self.inputs)
        tensors = self.inputs.take(self.reader)
        with (
            contextlib.suppress(Enough),
            saved_tensors_hooks(fill, lambda value: value),
            torch.enable_grad(),
            self.surroundings.restored(),
            self.state.restored(self.label),
            self.contexts[1],
        ):
            self.again(tensors)
        if count != len(self.holders):
            raise RecomputeError(
                f"{self.label} saved {len(self.holders)} tensors for backward at first, and "
                f"{count} when it was recomputed: {SAME_AGAIN}"
            )

    def forget(self) -> None:
        """Drop what this backward pass computed and did not read."""
        self.values.clear()


class Kind:
    """What is known of a saved tensor without keeping it."""

    __slots__ = ("device", "dtype", "parameter", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.parameter = parameter_version(tensor)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def check(self, tensor: torch.Tensor, label: str) -> None:
        """Raises RecomputeError: the tensor is another one than at first."""
        now = Kind(tensor)
        if (self.shape, self.dtype, self.device) != (now.shape, now.dtype, now.device):
            raise RecomputeError(
                f"{label} saved a {self} on {self.device} for backward at first, and a {now} on "
                f"{now.device} in its place when it was recomputed: {SAME_AGAIN}"
            )
        if None not in (self.parameter, now.parameter) and self.parameter != now.parameter:
            raise RecomputeError(
                f"a parameter {self} of {label} was changed in place between forward and backward "
                "(an optimizer step, a load): the recomputation would see other values; run "
                "backward first"
            )


def parameter_version(tensor: torch.Tensor) -> int | None:
    """Version of the parameter that a tensor is, or is a view of; None for any other tensor."""
    base = tensor._base if tensor._is_view() else tensor
    return base._version if isinstance(base, torch.nn.Parameter) else None


def clear_after_backward(owner: Region | Inputs) -> None:
    """Call the owner's `forget` when the backward pass is over that asks now, if it lives then."""
    forget = weakref.WeakMethod(owner.forget)

    def clear() -> None:
        alive = forget()
        if alive is not None:
            alive()

    # The engine has no public name. Outside of backward (somebody looks at a saved tensor) it
    # refuses, and the values live as long as the graph.
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        with contextlib.suppress(RuntimeError):
            engine.queue_callback(clear)
