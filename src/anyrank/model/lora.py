"""LoRA layers of a live model: which factors are to be added to which weight.

Only what `merge_and_unload()` of PEFT does to linear and embedding layers; anything else that an
adapter may be is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.errors import LoadError
from anyrank.model.tensors import ModelTensor, Registration
from anyrank.model.wrappers import plain_class

KINDS = ("Linear", "Embedding")  # of peft.tuners.lora
WAY_OUT = "merge with PEFT (merge_and_unload) before"


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter of one weight.

    Attributes:
        adapter: its name.
        a, b: positions of the factors among the model's tensors.
        scaling: as PEFT has it, with rsLoRA's root and whatever else the user has set.
        transposed: whether the weight is stored [in, out].
        narrows: whether the product is rounded to the weight's dtype before it is added.
    """

    adapter: str
    a: int
    b: int
    scaling: float
    transposed: bool
    narrows: bool


@dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
        added: position of a weight -> its adapters, in the order in which they are added.
        dropped: positions of tensors that a merged model has not, other than the factors above.
    """

    added: Mapping[int, tuple[Factors, ...]]
    dropped: frozenset[int]


def find_lora(tensors: Sequence[ModelTensor]) -> Lora:
    """What merging the active adapters of a model adds to which weight.

    Raises:
        LoadError: an adapter that is not plain LoRA, or a weight that is tied; named.
    """
    at = {id(tensor.tensor): index for index, tensor in enumerate(tensors)}
    added: dict[int, tuple[Factors, ...]] = {}
    dropped: set[int] = set()
    seen: set[int] = set()
    for index, tensor in enumerate(tensors):
        place = tensor.registrations[0]
        if tensor.adapter:
            dropped.add(index)
            layer: Any = next(
                (m for m in place.path if hasattr(m, "merged_adapters")), place.module
            )
            if id(layer) not in seen:
                seen.add(id(layer))
                found = _factors(tensor.name, layer, at)
                if found:
                    base = at[id(layer.get_base_layer().weight)]
                    _check_weight(tensors[base])
                    added[base] = found
        elif not _is_saved_copy(place):
            dropped.add(index)
    used = {number for found in added.values() for each in found for number in (each.a, each.b)}
    return Lora(added, frozenset(dropped - used))


def merged_name(place: Registration) -> str:
    """The name of a place in the merged model."""
    parts = place.name.split(".")
    if "modules_to_save" in parts:
        n = parts.index("modules_to_save")
        del parts[n : n + 2]  # with the adapter's name
    return ".".join(parts)


def _factors(name: str, layer: Any, at: Mapping[int, int]) -> tuple[Factors, ...]:
    """The adapters of a layer that are active, and not merged yet.

    Raises:
        LoadError: one that is not plain LoRA.
    """
    kind = plain_class(layer)
    if kind.__name__ not in KINDS or not kind.__module__.startswith("peft.tuners.lora."):
        what = f"{kind.__module__}.{kind.__name__}"
        raise LoadError(f"{name}: is of a {what}, and merge=True adds plain LoRA alone: {WAY_OUT}")
    if layer.disable_adapters:
        raise LoadError(
            f"{name}: its adapters are disabled: enable them, or give the model that PEFT's "
            "unload() leaves, without merge=True"
        )
    found: list[Factors] = []
    is_embedding = kind.__name__ == "Embedding"
    tables = (
        (layer.lora_embedding_A, layer.lora_embedding_B)
        if is_embedding
        else (layer.lora_A, layer.lora_B)
    )
    for adapter in layer.active_adapters:
        if adapter in layer.merged_adapters or adapter not in tables[0]:
            continue
        variant = layer.lora_variant.get(adapter)
        if variant is not None or layer.lora_bias[adapter]:
            what = "lora_bias" if variant is None else type(variant).__name__
            raise LoadError(f"{name}: has {what}, and merge=True adds plain LoRA alone: {WAY_OUT}")
        a, b = (table[adapter] if is_embedding else table[adapter].weight for table in tables)
        transposed = is_embedding or bool(layer.fan_in_fan_out)
        scaling = float(layer.scaling[adapter])
        found.append(Factors(adapter, at[id(a)], at[id(b)], scaling, transposed, is_embedding))
    return tuple(found)


def _check_weight(weight: ModelTensor) -> None:
    """Raises LoadError: a weight to which nothing can be added."""
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise LoadError(f"{weight.name}: is {weight.dtype}, to which no adapter can be added")
    first, *places = weight.registrations
    tied = [place.name for place in places if place.module is not first.module]
    if tied:
        others = ", ".join(tied)
        raise LoadError(
            f"{weight.name}: is tied with {others}, and its adapter changes one of them: untie "
            "them, or leave the layer out of the adapter"
        )


def _is_saved_copy(place: Registration) -> bool:
    """Whether the merged model has a tensor: not the original of a copy that was trained."""
    parts = place.names[0].split(".")
    for depth, module in enumerate(place.path):
        copies = module.__dict__["_modules"].get("modules_to_save")
        if copies is not None:
            wrapper: Any = module
            active = next((name for name in wrapper.active_adapters if name in copies), None)
            kept = ["original_module"] if active is None else ["modules_to_save", active]
            return parts[depth : depth + len(kept)] == kept
    return True
