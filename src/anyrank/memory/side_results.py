"""What a tiled module leaves beside its results, of which only the last tile's would be seen."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from torch import nn

from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.walk import walk

INTERNAL = frozenset(vars(nn.Module()))


class SideResults:
    """The attributes of some modules, and what transformers records of them, before a tile runs."""

    @uncompiled
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.attributes = dict(attributes_of(modules))
        self.recorded = recorded()

    @uncompiled
    def check(self, label: str) -> None:
        """After a tile.

        Raises:
            ValueError: the tile has left a tensor with a gradient in an attribute, or transformers
                has recorded a part of it.
        """
        for name, tensor in attributes_of(self.modules):
            if self.attributes.get(name) is not tensor:
                raise ValueError(
                    f"{label}: each tile leaves a tensor with a gradient in the attribute {name}, "
                    "where only the last tile's would be seen: return it as a result, tile a "
                    "module inside that does not (the experts, not their router), or use recompute"
                )
        for key, number in recorded().items():
            if self.recorded.get(key, number) != number:
                raise ValueError(
                    f"{label}: transformers records {key} inside of it, and would have one entry "
                    "for each tile: tile a module inside that is not recorded (the experts, not "
                    f"their router), or call the model with output_{key}=False"
                )


def attributes_of(modules: Sequence[nn.Module]) -> Generator[tuple[str, torch.Tensor]]:
    """Names and tensors that modules keep in plain attributes, and that have a graph."""
    seen = set[nn.Module]()
    for top in modules:
        for name, module in walk(top, "", seen):
            own = [name for name, _ in module.named_parameters(recurse=False)]
            for key, value in vars(module).items():
                # torch's hooks for weight norm, spectral norm and pruning compute `weight` of the
                # parameters `weight_g`, `weight_orig`: it does not depend on the tile.
                if key in INTERNAL or any(p.startswith(f"{key}_") for p in own):
                    continue
                for part, tensor in tensors_in(value):
                    yield f"{name}.{key}{part}".removeprefix("."), tensor


def tensors_in(value: Any) -> Generator[tuple[str, torch.Tensor]]:
    """Tensors with a graph that an attribute is, or that the container in it holds."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield "", value
    elif isinstance(value, dict):
        for key, each in cast("dict[Any, Any]", value).items():
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                yield f"[{key!r}]", each
    elif isinstance(value, list | tuple):
        for key, each in enumerate(cast("Sequence[Any]", value)):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                yield f"[{key}]", each


def recorded() -> dict[str, int]:
    """How many outputs of modules transformers has recorded in the call that is under way."""
    module = sys.modules.get("transformers.utils.output_capturing")
    active: Any = getattr(module, "_active_collector", None)
    lists: dict[str, Any] = (active.get() if active is not None else None) or {}
    return {key: len(each) for key, each in lists.items() if isinstance(each, list)}
