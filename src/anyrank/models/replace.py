"""New memory in place of meta tensors. The tensor objects stay the same if torch can keep them.

Optimizers, wrappers and hooks hold the Parameter objects, so `torch.utils.swap_tensors` puts the
memory into them. It refuses a tensor that something else refers to, weakly or in a graph.
References of the owning module (`nn.RNNBase` keeps weak ones, the legacy `weight_norm` a graph) are
undone for the swap; with any other the module gets a new object, as with torch's `assign=True`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from anyrank.models.dtensors import dtensor_like
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.wrapped import is_wrapper, rewrapped

# Properties, so that they stay with the object while its memory is swapped.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Replacement:
    """One meta tensor and its replacement; creating it changes nothing.

    Attributes:
        target: its `tensor` is the one in the model, before and after.
        same: whether the tensor object is still the one that the model was built with.
    """

    def __init__(self, target: ModelTensor, local: torch.Tensor) -> None:
        self.target = target
        self.same = True
        self.other = _like(target, local)

    def toggle(self) -> None:
        """Exchange the tensor with the other one; a second call undoes it."""
        old, new = self.target.tensor, self.other
        listed = _weak_entries(self.target)
        for entries, n in listed:
            entries[n] = None
        _cut_graphs(self.target)
        try:
            torch.utils.swap_tensors(old, new)
        except (RuntimeError, TypeError):
            self._assign(new)
        finally:
            for entries, n in listed:
                entries[n] = weakref.ref(self.target.tensor)
        for name in HOOKS:
            hooks = getattr(old, name)
            if hooks:
                setattr(self.target.tensor, name, hooks)  # attaches them to the memory, too

    def _assign(self, new: Any) -> None:
        self.same = not self.same
        self.other, self.target.tensor = self.target.tensor, new
        for entry in self.target.registrations:
            setattr(entry.module, entry.attribute, new)


def replace(replacements: Sequence[Replacement]) -> list[str]:
    """Put all of them in place, or none.

    Returns:
        Names of the tensors that are new objects.
    """
    done: list[Replacement] = []
    try:
        for replacement in replacements:
            done.append(replacement)
            replacement.toggle()
    except BaseException:
        for replacement in done[:-1]:  # the meta tensors are back
            replacement.toggle()
        raise
    return [replacement.target.name for replacement in done if not replacement.same]


def _like(target: ModelTensor, local: torch.Tensor) -> Any:
    """Make a tensor of the target's class, layout and attributes around new memory."""
    old: Any = target.tensor
    with torch.inference_mode(False):
        new: Any = local.detach()
        if target.is_dtensor:
            new = dtensor_like(
                old, new, placements=old.placements, shape=old.shape, stride=old.stride()
            )
            new = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        elif is_wrapper(old):
            new = nn.Parameter(rewrapped(old, new), requires_grad=False)
        elif type(old) is not torch.Tensor:  # a Parameter, or a subclass of the user's
            new = new.as_subclass(type(old))
        new.requires_grad_(old.requires_grad)
    inner = vars(new) if is_wrapper(new) else {}  # a wrapper keeps its new memory there
    new.__dict__.update(vars(old) | inner)
    return new


def _weak_entries(target: ModelTensor) -> list[tuple[list[Any], int]]:
    """Entries of the owning modules' lists that refer to the tensor weakly."""
    if not weakref.getweakrefs(target.tensor):
        return []
    return [
        (entries, n)
        for owner in target.registrations
        for entries in vars(owner.module).values()
        if isinstance(entries, list)
        for n, entry in enumerate(entries)
        if isinstance(entry, weakref.ref) and entry() is target.tensor
    ]


def _cut_graphs(target: ModelTensor) -> None:
    """Drop the graph of a value that a module computed from its parameters while on meta.

    A hook computes the value again before the module runs.
    """
    for owner in target.registrations:
        attributes = vars(owner.module)
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and value.is_meta and value.grad_fn is not None:
                attributes[name] = value.detach()
