"""DoRA's magnitudes: those of a new adapter are norms of the base weights, so that it changes
nothing, and have to be computed again when other base weights are there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.model.tensors import ModelTensor, Registration
from anyrank.model.wrappers import plain_class
from anyrank.tensors.box import Box

TABLE = "lora_magnitude_vector"  # of a LoRA layer: adapter -> the module with its magnitudes


def is_magnitude(target: ModelTensor) -> bool:
    """Whether a tensor is a magnitude vector of DoRA."""
    return target.adapter and TABLE in target.registrations[0].names[0].split(".")


def recompute_magnitudes(targets: Iterable[ModelTensor], trained_too: bool) -> dict[str, str]:
    """Give magnitudes the values that PEFT gives a new adapter on the present base weights.

    All ranks that share the layers call it with the same targets: a sharded layer's weights are
    gathered, one layer at a time.

    Args:
        targets: magnitudes, in place.
        trained_too: also those of an adapter that was trained, which keep their values else.

    Returns:
        Name -> the rule that was run.
    """
    rules: dict[str, str] = {}
    for target in targets:
        place = target.registrations[0]
        layer, adapter = _layer_of(place)
        a, b = (whole(weight) for weight in _factors(layer, adapter))
        if not trained_too and a.any() and b.any():
            continue
        fresh: Any = _bare(place.module)
        base = _bare(layer.get_base_layer())
        for name, weight in layer.get_base_layer().named_parameters(recurse=False):
            base._parameters[name] = nn.Parameter(whole(weight), requires_grad=False)
        with torch.no_grad():
            scaling = layer.scaling[adapter]
            fresh.update_layer(base_layer=base, lora_A=a, lora_B=b, scaling=scaling)
            local = target.local()
            for piece in target.pieces:
                part = local[Box(piece.local, piece.box.sizes).slices()]
                part.copy_(fresh.weight.detach()[piece.box.slices()])
        rules[target.name] = f"{plain_class(place.module).__name__}.update_layer"
    return rules


def _layer_of(place: Registration) -> tuple[Any, str]:
    parts = place.names[0].split(".")
    layer = next(m for m in reversed(place.path) if hasattr(m, TABLE))
    return layer, parts[parts.index(TABLE) + 1]


def _factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    if adapter in layer.lora_A:
        return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bare(module: nn.Module) -> Any:
    """A copy that shares everything but its parameters, of the class that the user wrote."""
    kind = plain_class(module)
    made: Any = kind.__new__(kind)
    made.__dict__ = copy.copy(module.__dict__)
    made.__dict__["_parameters"] = {}
    return made
