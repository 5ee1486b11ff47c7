"""What an optimizer keeps in attributes, of which torch's own `state_dict()` knows nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

PLAIN = ("state", "param_groups", "defaults")  # what every optimizer has, and is saved by name
OF_TORCH = "_optimizer_"  # hooks, which a save knows of
LEAVES = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType)


def kept_elsewhere(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor | Optimizer]]:
    """Tensors other than the parameters, and other optimizers, in an optimizer's attributes."""
    seen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    seen |= {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
    for name, value in vars(optimizer).items():
        if name not in PLAIN and not name.startswith(OF_TORCH):
            yield from within(name, value, seen)


def within(
    where: str, value: Any, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor | Optimizer]]:
    """Tensors and optimizers in a value: in containers, modules and plain objects.

    A module with a parameter that was seen is the one that is trained: a part of its own.
    """
    if id(value) in seen or isinstance(value, LEAVES):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor | Optimizer):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from within(f"{where}.{key if isinstance(key, str) else '*'}", item, seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in cast("list[Any]", value):
            yield from within(f"{where}.*", item, seen)
    elif isinstance(value, nn.Module):
        if not any(id(parameter) in seen for parameter in value.parameters()):
            for name, tensor in value.state_dict(keep_vars=True).items():
                yield from within(f"{where}.{name}", tensor, seen)
    elif not _is_of_torch(value):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from within(f"{where}.{name}", item, seen)


def _is_of_torch(value: Any) -> bool:
    """Whether torch, or this library, made an object's class: their objects are looked after."""
    return type(value).__module__.partition(".")[0] in ("torch", "anyrank")


def numbers_in(optimizer: Optimizer) -> dict[str, int | float]:
    """The numbers in an optimizer's attributes."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def changed_numbers(optimizer: Optimizer, before: Mapping[str, int | float]) -> list[str]:
    """Names of numbers in attributes that are not what they were `before`: a step counter, say."""
    return [name for name, now in numbers_in(optimizer).items() if before.get(name) != now]
