"""What an optimizer keeps in attributes, of which torch's own `state_dict()` knows nothing.

Tensors in an attribute, and in containers there, are its state: they are saved by its own methods
or refused. Numbers, and tensors within modules and objects, may be anything (a class weight, the
model itself, a cache): they are its state if they change while it steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anyrank.tensors.sharded_tensor import version_of

PLAIN = ("state", "param_groups", "defaults")  # what every optimizer has, and is saved by name
CACHES = ("_numel_cache",)  # of LBFGS
LEAVES = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType)
OBJECTS = 3  # levels of plain objects within each other that are looked into
Found = torch.Tensor | Optimizer


def kept_elsewhere(optimizer: Optimizer) -> Iterator[tuple[str, Found]]:
    """Tensors other than the parameters, and other optimizers, in attributes and containers."""
    seen = _own(optimizer)
    for name, value in _attributes(optimizer):
        yield from within(name, value, seen)


def within(where: str, value: Any, seen: set[int], objects: int = 0) -> Iterator[tuple[str, Found]]:
    """Tensors and optimizers in a value, also in modules and in so many levels of plain objects."""
    if id(value) in seen or isinstance(value, LEAVES):
        return
    seen.add(id(value))
    if isinstance(value, Found):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            name = f"{where}.{key if isinstance(key, str) else '*'}"
            yield from within(name, item, seen, objects)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in cast("list[Any]", value):
            yield from within(f"{where}.*", item, seen, objects)
    elif objects and isinstance(value, nn.Module):
        for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from within(f"{where}.{name}", tensor, seen)
    elif objects and type(value).__module__.partition(".")[0] not in ("torch", "anyrank"):
        for name, item in _variables(value):
            yield from within(f"{where}.{name}", item, seen, objects - 1)


def watched(optimizer: Optimizer) -> dict[str, object]:
    """What may be state or not: numbers by their value, tensors by their identity and version."""
    seen = {*_own(optimizer), *(id(found) for _, found in kept_elsewhere(optimizer))}
    noted: dict[str, object] = {}
    for name, value in _attributes(optimizer):
        if type(value) in (int, float):
            noted[name] = repr(value)
        for where, found in within(name, value, seen, OBJECTS):
            if isinstance(found, torch.Tensor) and not is_lazy(found):
                noted[where] = id(found), version_of(found)
    return noted


def changed(optimizer: Optimizer, before: Mapping[str, object], known: Container[int]) -> list[str]:
    """Names of what changed in attributes, and is in no part of the state.

    Args:
        optimizer: as it is now.
        before: what `watched` said before it stepped.
        known: ids of the tensors that the modules of the state hold.
    """
    now = watched(optimizer).items()
    return [
        name
        for name, value in now
        if before.get(name) != value and not (isinstance(value, tuple) and value[0] in known)
    ]


def _own(optimizer: Optimizer) -> set[int]:
    """Ids of what is saved by name: parameters, state and groups."""
    seen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return seen | {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if name not in PLAIN and name not in CACHES:
            yield name, value


def _variables(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's attributes, also of those in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
