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


def untrained_magnitudes(targets: Iterable[ModelTensor]) -> list[ModelTensor]:
    """Those that go with the present base weights as PEFT makes them, so not with others.

    Called before other weights are in place. All ranks that share the layers call it with the same
    targets: a sharded layer's weights are gathered, one layer at a time.
    """
    return [target for target in targets if _is_untrained(target)]


def _is_untrained(target: ModelTensor) -> bool:
    layer, adapter = _layer_of(target.registrations[0])
    if any(factor.is_meta or not whole(factor).any() for factor in _factors(layer, adapter)):
        return True
    if any(weight.is_meta for weight in layer.get_base_layer().parameters(recurse=False)):
        return False
    held, fresh = whole(target.tensor), _first_values(target)
    # Alike up to the order of sums: another device computed them, perhaps.
    return torch.allclose(held, fresh.to(held), rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def recompute_magnitudes(targets: Iterable[ModelTensor]) -> dict[str, str]:
    """Give magnitudes the values that PEFT gives a new adapter on the present base weights.

    All ranks that share the layers call it with the same targets: a sharded layer's weights are
    gathered, one layer at a time.

    Args:
        targets: magnitudes, in place.

    Returns:
        Name -> the rule that was run.
    """
    rules: dict[str, str] = {}
    for target in targets:
        values, local = _first_values(target), target.local()
        for piece in target.pieces:
            part = local[Box(piece.local, piece.box.sizes).slices()]
            part.copy_(values[piece.box.slices()])
        kind = plain_class(target.registrations[0].module)
        rules[target.name] = f"{kind.__name__}.update_layer"
    return rules


@torch.no_grad()
def _first_values(target: ModelTensor) -> torch.Tensor:
    """What PEFT's own code computes for the whole tensor from the weights that are there."""
    place = target.registrations[0]
    layer, adapter = _layer_of(place)
    a, b = (whole(weight) for weight in _factors(layer, adapter))
    fresh: Any = _bare(place.module)
    base = _bare(layer.get_base_layer())
    for name, weight in layer.get_base_layer().named_parameters(recurse=False):
        base._parameters[name] = nn.Parameter(whole(weight), requires_grad=False)
    fresh.update_layer(base_layer=base, lora_A=a, lora_B=b, scaling=layer.scaling[adapter])
    return fresh.weight.detach()


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
