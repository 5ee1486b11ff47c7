"""One recomputed region: runs a function, saves nothing of it, runs it again when backward asks.

The tensors that the function saves for backward are replaced by holders. The first holder that
backward opens runs the function again, up to the last tensor that it saved; each value is used
once and dropped, and none outlives the backward pass. So any number of backward passes, tensors
that are read twice, and nested regions need no further rule: what is missing is computed again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.captured_watch import changed_error, text_of
from anyrank.memory.module_state import ModuleState
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.sharded_tensor import version_of

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


SAME_AGAIN = (
    "it must do the same both times, so it may not depend on a counter, a key-value cache "
    "(transformers: use_cache=False) or any other state that changes in between"
)


class _RecomputationDone(BaseException):
    """Ends a recomputation once it has saved all tensors; `except Exception` does not catch it."""


class Holder:
    """Represents one saved tensor in the graph."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


class Region:
    """State of one call. Its holders own it, and it dies with the graph.

    Args:
        again: runs the function on the inputs' tensors, detached from the graph.
        inputs: what the function starts from; `reader` is the region's number among those that
            share the inputs.
        ambient: the random state, autocast and device of both runs.
        state: the captured tensors, of both runs.
        contexts: one context for the first run and one for the others (selective policies).
    """

    def __init__(
        self,
        again: Callable[[Sequence[torch.Tensor]], Any],
        inputs: SavedInputs,
        ambient: AmbientState,
        state: ModuleState,
        *,
        reader: int = 0,
        contexts: Contexts | None = None,
    ) -> None:
        self.again = again
        self.inputs = inputs
        self.ambient = ambient
        self.state = state
        self.reader = reader
        self.contexts = contexts or (contextlib.nullcontext(), contextlib.nullcontext())
        self.holders: list[weakref.ref[Holder]] = []
        self.metas: list[_TensorMeta] = []
        self.values: dict[int, tuple[torch.Tensor, int]] = {}
        self.lock = threading.RLock()  # backward has a thread for each device

    @property
    def label(self) -> str:
        return self.inputs.label

    def run(self, first: Callable[[], Any]) -> Any:
        """The first run, on the tensors that require gradients."""
        with saved_tensors_hooks(self.pack, self.unpack), self.contexts[0]:
            result = first()
        self.state.settle()
        return result

    def pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(len(self.metas))
        self.holders.append(weakref.ref(holder))
        self.metas.append(_TensorMeta(tensor))
        return holder

    def unpack(self, holder: Holder) -> torch.Tensor:
        with self.lock:
            if holder.index not in self.values:
                self.recompute()
            value, saved_at = self.values.pop(holder.index)
        if version_of(value) != saved_at:
            raise RecomputeError(
                f"{self.label} changes a {self.metas[holder.index]} in place after an operation "
                "has saved it for backward: use the operation that returns a new tensor"
            )
        return value

    def recompute(self) -> None:
        """Run the function again for the values of all holders that are alive."""
        count = 0
        changed = {
            n: now for n, meta in enumerate(self.metas) if (now := meta.version_if_changed())
        }

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            if count == len(self.holders):  # a bare `except:` in the function caught it
                raise _RecomputationDone
            # Detached: otherwise the graph of this run would hold a reference cycle.
            value = tensor.detach()
            if self.holders[count]() is not None:
                self.metas[count].check(tensor, self.label)
                self.metas[count].check_parameter(tensor, self.label)
                if count in changed:
                    self.metas[count].check_version(tensor, changed[count], self.label)
                self.values[count] = (value, version_of(value))
            count += 1
            if count == len(self.holders):
                raise _RecomputationDone
            return value

        _clear_after_backward(self)
        _clear_after_backward(self.inputs)
        tensors = self.inputs.take(self.reader)
        with (
            contextlib.suppress(_RecomputationDone),
            saved_tensors_hooks(fill, lambda value: value),
            torch.enable_grad(),
            self.ambient.restored(),
            self.state.restored(self.label),
            self.contexts[1],
        ):
            try:
                self.again(tensors)
            except RuntimeError:  # TorchScript makes one of _RecomputationDone
                if count != len(self.holders):
                    raise
            if count != len(self.holders):
                raise RecomputeError(
                    f"{self.label} saved {len(self.holders)} tensors for backward at first, and "
                    f"{count} when it was recomputed: {SAME_AGAIN}"
                )

    def forget(self) -> None:
        """Drop what this backward pass computed and did not use."""
        self.values.clear()


class _TensorMeta:
    """Shape, dtype, device and version of a saved tensor, without its values.

    A tensor that the function has not made itself is saved as the same object again: then both runs
    must have seen the same version.
    """

    __slots__ = ("alive", "device", "dtype", "shape", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.version = version_of(tensor)
        self.alive = weakref.ref(_base_of(tensor))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def check(self, tensor: torch.Tensor, label: str) -> None:
        """Raises RecomputeError: the tensor differs from the first run's."""
        if (self.shape, self.dtype, self.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise RecomputeError(
                f"{label} saved a {self} on {self.device} for backward at first, and a "
                f"{text_of(tensor)} on {tensor.device} in its place when it was recomputed: "
                f"{SAME_AGAIN}"
            )

    def check_parameter(self, tensor: torch.Tensor, label: str) -> None:
        """Raises RecomputeError: another parameter than in the first run."""
        then, now = self.alive(), _base_of(tensor)
        both = isinstance(then, torch.nn.Parameter) and isinstance(now, torch.nn.Parameter)
        if both and then is not now:
            raise RecomputeError(
                f"{label} has used other parameters, {self}, when it was recomputed: a variable or "
                "attribute that chooses them was changed before backward, as by the next turn of a "
                "loop: bind it as an argument"
            )

    def version_if_changed(self) -> int:
        """The version of the first run's tensor if it is alive and was changed since, else 0."""
        tensor = self.alive()
        now = 0 if tensor is None else version_of(tensor)
        return now if now != self.version else 0

    def check_version(self, tensor: torch.Tensor, before: int, label: str) -> None:
        """Raises RecomputeError: it is the first run's tensor, changed before the second run, whose
        version was `before` then. What the second run has overwritten itself has a later one.
        """
        base = _base_of(tensor)
        if base is self.alive() and version_of(base) == before:
            kind = "parameter" if isinstance(base, torch.nn.Parameter) else "captured tensor"
            raise changed_error(label, f"a {kind}, {self}, was changed in place")


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a view of, or itself."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _clear_after_backward(owner: Region | SavedInputs) -> None:
    """Call the owner's `forget` at the end of the current backward pass, if it is alive then."""
    forget = weakref.WeakMethod(owner.forget)

    def clear() -> None:
        alive = forget()
        if alive is not None:
            alive()

    # The engine has no public name. Outside of backward (when saved tensors are inspected) it
    # raises, and the values live as long as the graph.
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        with contextlib.suppress(RuntimeError):
            engine.queue_callback(clear)


class _SaveForRegion(torch.autograd.Function):
    """Saves tensors for backward and computes nothing: the saved-tensor hooks of an outer region
    see them here first.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> None:
        raise AssertionError("the result of _SaveForRegion is never used")


class SavedInputs:
    """Tensors of one call, kept until the graph dies: by autograd, an offload or an outer region.

    Args:
        tensors: all tensors of the call, each object once.
        names: how the user would write them, for messages.
        label: the call, for messages.
        pack: moves the tensors away and returns the function that restores them; None keeps them
            as saved tensors of the graph.
    """

    @uncompiled
    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Callable[[int], str],
        label: str,
        *,
        pack: Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]] | None = None,
    ) -> None:
        self.names = names
        self.label = label
        self.grads = [tensor.requires_grad for tensor in tensors]
        self.versions = [version_of(tensor) for tensor in tensors]
        self.alive = [weakref.ref(tensor) for tensor in tensors]
        self.shared: list[torch.Tensor] | None = None
        self.lock = threading.RLock()
        if pack is not None:
            self.restore = pack(tensors)
        else:
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            node: Any = _SaveForRegion.apply(anchor, *tensors).grad_fn
            self.restore = lambda: list(node.saved_tensors)

    @uncompiled
    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a function that changed its arguments: it cannot run twice.

        Raises:
            RecomputeError: names the argument.
        """
        for n, (tensor, before) in enumerate(zip(tensors, self.versions, strict=True)):
            if version_of(tensor) != before:
                raise RecomputeError(
                    f"{self.label} changes {self.names(n)} in place, and would start from the "
                    "changed values when it is recomputed: clone the argument inside, or use the "
                    "operation that returns a new tensor"
                )

    def take(self, reader: int) -> list[torch.Tensor]:
        """The tensors for region number `reader`, detached from the graph, with `requires_grad` as
        before. Restored tensors are shared until region 0, which backward reaches last.

        Raises:
            RecomputeError: a tensor was changed in place since.
            RuntimeError: of hooks for saved tensors.
        """
        with self.lock:
            tensors = self.shared
            if tensors is None:
                try:
                    tensors = self.restore()
                except RuntimeError as error:
                    self.raise_if_changed(error)
                    error.add_note(f"while taking the inputs of {self.label} to recompute it")
                    raise
            self.shared = tensors if reader > 0 else None
        return [
            tensor.detach().requires_grad_(grad)
            for tensor, grad in zip(tensors, self.grads, strict=True)
        ]

    def raise_if_changed(self, error: RuntimeError) -> None:
        """Raises RecomputeError: autograd raised `error` for a tensor that was changed."""
        for n, (ref, before) in enumerate(zip(self.alive, self.versions, strict=True)):
            tensor = ref()
            if tensor is not None and version_of(tensor) != before:
                how = f"{self.names(n)}, {text_of(tensor)}, was changed in place"
                raise changed_error(self.label, how) from error

    def forget(self) -> None:
        """Drop restored tensors that no region of this backward pass has used."""
        self.shared = None
