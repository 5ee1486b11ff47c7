"""First values of parametrised tensors (`torch.nn.utils.parametrize`).

The module's own rules know the tensor, and not what it is computed from. So they fill it in a
stand-in of the module as it was before, and `right_inverse` of the first parametrisation gives the
rest, as when it was registered.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from anyrank.model.tensors import ModelTensor, Registration

TABLE = "parametrizations"  # of a parametrised module: tensor -> its ParametrizationList


def before_parametrisation(target: ModelTensor) -> ModelTensor | None:
    """The tensor that a parametrised module had in place of a target; None if the target is none.

    It has the name that it had then, by which its random numbers are seeded, and no values.
    """
    place = target.registrations[0]
    if not isinstance(place.module, parametrize.ParametrizationList):
        return None
    if not place.attribute.startswith("original"):
        return None  # a buffer or parameter of the list itself
    owner = place.path[-3]
    names = tuple(_outer(name) for name in place.names)
    before = Registration(names, owner, names[0].rpartition(".")[2], place.path[:-2])
    return replace(target, name=_outer(target.name), registrations=[before])


def _outer(name: str) -> str:
    """`0.parametrizations.weight.original1` -> `0.weight`."""
    *owner, _, tensor, _ = name.split(".")
    return ".".join((*owner, tensor))


@contextmanager
def plain_stand_in(
    stand_ins: dict[int, nn.Module], before: ModelTensor, device: torch.device
) -> Generator[nn.Parameter]:
    """Put a stand-in of a parametrised module as it was before in place of its stand-in.

    Args:
        stand_ins: of the model's modules, by their ids.
        before: see `before_parametrisation`.
        device: where the wanted tensor is to be.

    Yields:
        The wanted tensor, uninitialised; the module's other parametrised ones are on meta.
    """
    place = before.registrations[0]
    present = stand_ins[id(place.module)]
    kind: Any = parametrize.type_before_parametrizations(present)
    made: Any = kind.__new__(kind)
    made.__dict__ = dict(present.__dict__)
    children = present.__dict__["_modules"]
    made.__dict__["_modules"] = {n: child for n, child in children.items() if n != TABLE}
    parameters = made.__dict__["_parameters"] = dict(present.__dict__["_parameters"])
    for name, table in children[TABLE].items():
        shape, dtype = _computed(table)
        here = device if name == place.attribute else torch.device("meta")
        empty = torch.empty(shape, dtype=dtype, device=here)
        parameters[name] = nn.Parameter(empty, requires_grad=False)
    parents = [stand_ins[id(module)] for module in place.path[-2:-1]]
    for parent in parents:
        _exchange(parent, present, made)
    stand_ins[id(place.module)] = made
    try:
        yield parameters[place.attribute]
    finally:
        stand_ins[id(place.module)] = present
        for parent in parents:
            _exchange(parent, made, present)


def originals_of(
    stand_ins: dict[int, nn.Module], target: ModelTensor, value: torch.Tensor
) -> torch.Tensor:
    """What a target is for a value of the parametrised tensor, as torch computes it."""
    place = target.registrations[0]
    given: Any = value
    first: Any = next(stand_ins[id(place.module)].children())  # others are put after it
    if hasattr(first, "right_inverse"):
        with suppress(NotImplementedError):  # torch takes it for the identity then
            given = first.right_inverse(given)
    number = place.attribute.removeprefix("original")
    return given if not number else given[int(number)]


def _computed(table: nn.Module) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of what a list of parametrisations gives."""
    on_meta = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in (*table.named_parameters(), *table.named_buffers())
    }
    with torch.no_grad():
        made = torch.func.functional_call(table, on_meta)
    return made.shape, made.dtype


def _exchange(parent: nn.Module, old: nn.Module, new: nn.Module) -> None:
    children = parent.__dict__["_modules"]
    children.update({name: new for name, child in children.items() if child is old})
