"""The parameters and buffers of a function's modules, the same when the function runs again.

A recomputed function reads its weights a second time. The tensors that autograd saves are checked
elsewhere; a bias, an embedding or a buffer is not saved, and `torch.func.functional_call` has
restored the module's own weights by then. So the first run records which tensors the modules had,
and the second uses the same: replaced tensors are restored, changed ones are an error.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.errors import RecomputeError
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.walk import walk

# Buffers up to this size are kept by value, so that changes in between (the statistics of a second
# call, DDP's broadcast) do no harm. Larger ones are compared by version.
KEPT_BYTES = 64 << 10
MAX_OBJECTS = 1000  # visited while searching for the modules of a function


class RecordedTensor:
    """A tensor, its place in its module, and its version."""

    __slots__ = ("copy", "key", "name", "owner", "tensor", "version")

    def __init__(self, owner: dict[str, Any], key: str, name: str, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.key = key
        self.name = name
        self.tensor = tensor
        self.version = version_of(tensor)
        self.copy: torch.Tensor | None = None


class ModuleState:
    """The tensors of some modules, from before a function runs for the first time.

    Args:
        modules: as returned by `modules_in`.
        before: the state of an earlier tile of the same call, whose copies are still valid.
    """

    @uncompiled
    def __init__(self, modules: Iterable[nn.Module], before: ModuleState | None = None) -> None:
        self.parameters: list[RecordedTensor] = []
        self.buffers: list[RecordedTensor] = []
        known = (
            {} if before is None else {(id(each.owner), each.key): each for each in before.buffers}
        )
        seen = set[nn.Module]()
        for top in modules:
            for name, module in walk(top, "", seen):
                prefix = f"{name}." if name else ""
                parameters: dict[str, Any] = vars(module)["_parameters"]
                for key, tensor in parameters.items():
                    if tensor is not None:
                        self.parameters.append(
                            RecordedTensor(parameters, key, prefix + key, tensor)
                        )
                buffers: dict[str, Any] = vars(module)["_buffers"]
                for key, tensor in buffers.items():
                    if tensor is not None:
                        each = RecordedTensor(buffers, key, prefix + key, tensor)
                        each.copy = copy_of(each, module.training, known.get((id(buffers), key)))
                        self.buffers.append(each)

    @uncompiled
    def drop_unused_copies(self) -> None:
        """After the first run: drop copies of large buffers that it did not change."""
        for each in self.buffers:
            if each.tensor.nbytes > KEPT_BYTES and not has_changed(each):
                each.copy = None

    @contextlib.contextmanager
    def restored(self, label: str) -> Generator[None]:
        """Inside, give the modules the tensors and values of the first run.

        Raises:
            RecomputeError: a tensor was changed in place since, and its former value is lost.
        """
        changed = [each for each in self.parameters if version_of(each.tensor) != each.version]
        changed += [each for each in self.buffers if each.copy is None and has_changed(each)]
        if changed:
            each = changed[0]
            kind = "parameter" if each in self.parameters else "buffer"
            raise RecomputeError(
                f"{label}: {kind} {each.name}, {str(each.tensor.dtype).removeprefix('torch.')}"
                f"{list(each.tensor.shape)}, was changed in place between forward and backward (an "
                "optimizer step, a load): the recomputation would see different values; run "
                "backward first"
            )
        undo: list[tuple[RecordedTensor, Any]] = []
        try:
            for each in self.parameters:
                now = each.owner.get(each.key)
                if isinstance(now, torch.Tensor) and is_replaced(each.tensor, now):
                    undo.append((each, now))
                    each.owner[each.key] = each.tensor
            for each in self.buffers:
                now = each.owner.get(each.key)
                if now is not None:  # undone in any case: the function may assign to it again
                    undo.append((each, now))
                    # A copy of the copy: this run may change it, as batch norm does without a new
                    # version.
                    each.owner[each.key] = each.tensor if each.copy is None else each.copy.clone()
            yield
        finally:
            for each, now in undo:
                each.owner[each.key] = now


def has_changed(each: RecordedTensor) -> bool:
    """Whether a tensor was changed or replaced since it was recorded."""
    return version_of(each.tensor) != each.version or each.owner.get(each.key) is not each.tensor


def is_replaced(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a parameter was replaced, other than by FSDP2, whose gather changes the layout."""
    return then is not now and layout(then) == layout(now)


def layout(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def copy_of(
    each: RecordedTensor, training: bool, before: RecordedTensor | None
) -> torch.Tensor | None:
    """The value of a buffer that is small, or that the function may change; else None."""
    if before is not None and before.tensor is each.tensor and before.version == each.version:
        return before.copy
    if not training and each.tensor.nbytes > KEPT_BYTES:
        return None
    with torch.no_grad():
        return each.tensor.detach().clone()


def modules_in(fn: Callable[..., Any], leaves: Iterable[Any] = ()) -> list[nn.Module]:
    """The modules that a function runs, as far as can be seen: itself, its owner, its arguments,
    its captured variables and its globals. If it names children of a captured module
    (`self.block(x)`), these children alone.
    """
    found: dict[int, nn.Module] = {}
    waiting: list[Any] = [fn, *(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))]
    seen = set[int]()
    while waiting and len(seen) < MAX_OBJECTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            found[id(each)] = each
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, types.MethodType):
            owner = each.__self__
            waiting += [owner] if isinstance(owner, nn.Module) else used_by(each.__func__, owner)
        elif isinstance(each, types.FunctionType):
            waiting += captured_by(each)
        elif isinstance(each, list | tuple):
            waiting += cast("list[Any]", each)[:MAX_OBJECTS]
        elif isinstance(each, dict):
            waiting += list(cast("dict[Any, Any]", each).values())[:MAX_OBJECTS]
        elif callable(each) and not isinstance(each, type):
            waiting += used_by(getattr(type(each), "__call__", None), each)  # noqa: B004
    return list(found.values())


def used_by(method: Any, owner: Any) -> list[Any]:
    """What a method captures, and the attributes it uses of its owner, which is not a module."""
    if not isinstance(method, types.FunctionType):
        return [getattr(owner, "__wrapped__", None)]
    known: dict[str, Any] = getattr(owner, "__dict__", {})
    return [method, *(known[name] for name in method.__code__.co_names if name in known)]


def captured_by(fn: types.FunctionType) -> Generator[Any]:
    """The values of a function's cells, defaults and used globals."""
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return
    names = fn.__code__.co_names
    values = [fn.__globals__[name] for name in names if name in fn.__globals__]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    values += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for value in values:
        known = dict(value.named_children()) if isinstance(value, nn.Module) else {}
        children = [known[name] for name in names if name in known]
        yield from children or [value]
