"""Replaces meta tensors by real ones; the tensor objects stay the same if torch can keep them.

Optimizers, wrappers and hooks hold the Parameter objects, so `torch.utils.swap_tensors` gives these
the memory. It rejects a tensor to which something else refers, weakly or in a graph. References of
the owning module (`nn.RNNBase` has weak ones, the legacy `weight_norm` a graph) are removed for the
swap. If other references exist, the module gets a new object, as with torch's `assign=True`.
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

# Attributes to keep: they belong to the object, and not to the memory that is swapped.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Replacement:
    """One meta tensor and its replacement; the constructor changes nothing.

    Attributes:
        target: its `tensor` is always the one in the model, also after the replacement.
        same: whether the tensor object is still the one with which the model was built.
    """

    def __init__(self, target: ModelTensor, local: torch.Tensor) -> None:
        self.target = target
        self.same = True
        self.other = _like(target, local)

    def toggle(self) -> None:
        """Swap the tensor with its replacement; a second call undoes it."""
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
                setattr(self.target.tensor, name, hooks)  # also attaches them to the memory

    def _assign(self, new: Any) -> None:
        self.same = not self.same
        self.other, self.target.tensor = self.target.tensor, new
        for entry in self.target.registrations:
            setattr(entry.module, entry.attribute, new)


def replace(replacements: Sequence[Replacement]) -> list[str]:
    """Put all replacements in place, or none.

    Returns:
        Names of the tensors that are new objects.
    """
    done: list[Replacement] = []
    try:
        for replacement in replacements:
            done.append(replacement)
            replacement.toggle()
    except BaseException:
        for replacement in done[:-1]:  # the last one has undone itself
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
        elif type(old) is not torch.Tensor:  # a Parameter, or the user's subclass
            new = new.as_subclass(type(old))
        new.requires_grad_(old.requires_grad)
    inner = vars(new) if is_wrapper(new) else {}  # a wrapper holds its new memory in its attributes
    new.__dict__.update(vars(old) | inner)
    return new


def _weak_entries(target: ModelTensor) -> list[tuple[list[Any], int]]:
    """Find the entries in lists of the owning modules that refer to the tensor weakly."""
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
    """Drop the graph of a value that a module computed from its parameters while they were on meta.

    A hook computes the value again before the module runs.
    """
    for owner in target.registrations:
        attributes = vars(owner.module)
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and value.is_meta and value.grad_fn is not None:
                attributes[name] = value.detach()
