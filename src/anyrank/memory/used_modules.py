"""The modules of a recomputed function, and their tensors that must not change before backward.

A recomputed function reads its weights a second time, so they must have the values of the first
run: a change in between raises an error. Small buffers are kept by value instead: an update by the
function (batch norm) counts once, and updates in between do no harm.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from anyrank.errors import RecomputeError
from anyrank.memory.call import find_module
from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.torch_classes import is_dtensor
from anyrank.tensors.walk import walk

KEPT_BYTES = 64 << 10  # the largest buffer that is kept by value


def used_modules(fn: Callable[..., Any], leaves: Iterable[Any] = ()) -> list[nn.Module]:
    """Return the modules that a function is, is a method of, captures or gets as an argument.

    Modules in a captured list, tuple, dict or object, and modules that a captured function
    captures, are found too; nothing deeper is.
    """
    modules = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, nn.Module))
    if (owner := find_module(fn)) is not None:
        return [owner, *modules]
    for value in (getattr(fn, "__self__", None), *_variables(fn).values()):
        parts = (value,) if isinstance(value, nn.Module) else _parts(value)
        modules |= dict.fromkeys(part for part in parts if isinstance(part, nn.Module))
    return list(modules)


def _variables(fn: Any) -> dict[str, Any]:
    """Return the variables of outer scopes that a Python function uses, and its defaults."""
    fn = inspect.unwrap(fn) if hasattr(fn, "__wrapped__") else fn
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return {}
    variables = inspect.getclosurevars(fn)
    defaults = {f"default {n}": value for n, value in enumerate(fn.__defaults__ or ())}
    return {**variables.globals, **variables.nonlocals, **defaults, **(fn.__kwdefaults__ or {})}


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).values()
    if isinstance(value, list | tuple):
        return cast("Iterable[Any]", value)
    if isinstance(value, types.FunctionType):
        return inspect.getclosurevars(value).nonlocals.values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, type | types.ModuleType):
        return ()
    return getattr(value, "__dict__", {}).values()


class _Weight(NamedTuple):
    """A parameter or a large buffer of a module at the time of the call."""

    module: nn.Module
    key: str
    name: str
    tensor: torch.Tensor
    version: int
    is_read: bool  # for certain; otherwise only if its module is called

    def __str__(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "tensor"
        return f"{kind} {self.name}, {describe_tensor(self.tensor)},"

    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def is_replaced(self) -> bool:
        """Return True if the module now holds a different tensor; FSDP2's resharding is none."""
        now = getattr(self.module, self.key, None)
        if not isinstance(now, torch.Tensor) or now is self.tensor:
            return False
        if is_dtensor(now) or is_dtensor(self.tensor):
            return False
        return now.untyped_storage() is not self.tensor.untyped_storage()


class UsedModules:
    """The modules of one call, recorded before its first run.

    Args:
        fn: the function, without any `functools.partial`.
        leaves: its arguments.
        label: the call, for messages.
    """

    def __init__(self, fn: Callable[..., Any], leaves: Iterable[Any], label: str) -> None:
        self.fn = fn
        self.label = label
        self.modules = used_modules(fn, leaves)
        self.weights: list[_Weight] = []
        self.buffers: list[tuple[nn.Module, str]] = []
        # A module's forward uses all of the module. A function may use only a part of a module.
        whole = find_module(fn) is not None and getattr(fn, "__name__", "forward") == "forward"
        seen = set[nn.Module]()
        for top in self.modules:
            for name, module in walk(top, "", seen):
                self._add(module, f"{name}." if name else "", whole or module is top)
        self.variables = self._captured() if find_module(fn) is None else {}

    def _add(self, module: nn.Module, prefix: str, is_read: bool) -> None:
        for key, tensor in module.named_parameters(recurse=False):
            if not is_lazy(tensor):
                self._watch(module, key, prefix, tensor, is_read)
        for key, tensor in module.named_buffers(recurse=False):
            if tensor.nbytes <= KEPT_BYTES and not is_lazy(tensor):
                self.buffers.append((module, key))
            elif not is_lazy(tensor):
                self._watch(module, key, prefix, tensor, is_read)

    def _watch(
        self, module: nn.Module, key: str, prefix: str, tensor: torch.Tensor, is_read: bool
    ) -> None:
        version = version_of(tensor)
        self.weights.append(_Weight(module, key, prefix + key, tensor, version, is_read))

    def _captured(self) -> dict[str, nn.Module]:
        """Return the captured variables that hold modules."""
        variables = _variables(self.fn).items()
        return {name: value for name, value in variables if isinstance(value, nn.Module)}

    def check_first_run(self) -> None:
        """Check the weights after the first run.

        Raises:
            RecomputeError: the function has changed its own weight.
        """
        for weight in self.weights:
            if weight.is_changed():
                raise RecomputeError(
                    f"{self.label}: {weight} was changed in place by the function itself (such as "
                    "by nn.Embedding(max_norm=)), so recomputation would start from the changed "
                    "values. Do not recompute or tile the module that does it"
                )

    def values(self) -> list[torch.Tensor]:
        """Return copies of the small buffers."""
        return [getattr(module, key).detach().clone() for module, key in self.buffers]

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function runs again, on the weights of its first run.

        Raises:
            RecomputeError: a weight that the function reads was changed, or replaced.
        """
        for name, now in self._captured().items() if self.variables else ():
            if self.variables.get(name, now) is not now:
                how = f"variable {name} was assigned a different module (such as by a loop)"
                raise changed_error(self.label, how, f"pass {name} as an argument")
        changed: list[_Weight] = []
        for weight in self.weights:
            if weight.is_replaced():
                raise RecomputeError(
                    f"{self.label}: {weight} is not the tensor of the forward pass (such as after "
                    "torch.func.functional_call). Pass weights that change as arguments"
                )
            if weight.is_changed():
                changed.append(weight)
                if weight.is_read:
                    raise changed_error(self.label, f"{weight} was changed in place")
        return self._refused(changed) if changed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _refused(self, changed: list[_Weight]) -> Generator[None]:
        """Return a context in which calling a module with a changed weight raises an error."""

        def refuse(module: nn.Module, args: Any) -> None:
            parts = set(module.modules())
            for weight in changed:
                if weight.module in parts:
                    raise changed_error(self.label, f"{weight} was changed in place")

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    def restored(self, values: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function runs again with these values of small buffers.

        The function works on copies. Afterwards the original buffers are back, unchanged, because
        autograd may have saved them. A buffer whose size has changed, such as a growing table,
        is not replaced.
        """
        return self._restored(values) if values else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restored(self, values: list[torch.Tensor]) -> Generator[None]:
        now = [getattr(module, key) for module, key in self.buffers]
        try:
            for (module, key), buffer, value in zip(self.buffers, now, values, strict=True):
                if buffer.shape == value.shape:
                    setattr(module, key, value.clone())
            yield
        finally:
            for (module, key), buffer in zip(self.buffers, now, strict=True):
                setattr(module, key, buffer)


def describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def changed_error(label: str, how: str, alternative: str = "write to a clone") -> RecomputeError:
    """Return the error for a value that has changed since the first run.

    Args:
        label: the call.
        how: what has changed, as a clause.
        alternative: what the user can do other than run backward first.
    """
    return RecomputeError(
        f"{label}: {how} between forward and backward, so recomputation would use different "
        f"values. Run backward first (before an optimizer step or a load), or {alternative}"
    )
