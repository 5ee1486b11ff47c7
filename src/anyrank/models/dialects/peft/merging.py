"""The products that merging a model's LoRA adapters adds to its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.models.dialects.peft.adapters import is_below_merged
from anyrank.models.dialects.peft.names import is_peft
from anyrank.models.wrappers import ModelTensor, Registration, plain_class

LORA_KINDS = ("Linear", "Embedding")  # classes of peft.tuners.lora that `merge=True` can add
MERGE_BEFORE = "merge with PEFT (merge_and_unload) before"


def is_merged(tensor: ModelTensor) -> bool:
    """Return whether PEFT has added an adapter to a base weight, and can subtract it again."""
    return any(
        "base_layer" in entry.raw and is_below_merged(entry) for entry in tensor.registrations
    )


def scaling_of(tensor: ModelTensor) -> float | None:
    """PEFT's factor for the product of a LoRA layer's factors, of which this tensor is one."""
    if not tensor.adapter:
        return None
    path, parts = tensor.registrations[0].path, tensor.name.split(".")
    layer: Any = next((m for m in path if is_peft(m) and hasattr(m, "scaling")), None)
    scalings: Mapping[str, Any] = {} if layer is None else layer.scaling
    return next((float(factor) for name, factor in scalings.items() if name in parts), None)


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter of one weight.

    Attributes:
        adapter: its name.
        a, b: positions of the factors among the model's tensors.
        scaling: PEFT's scaling, including rsLoRA's root and everything that the user has set.
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
        dropped: positions of tensors that a merged model lacks, other than the factors above.
    """

    added: Mapping[int, tuple[Factors, ...]]
    dropped: frozenset[int]


def find_lora(tensors: Sequence[ModelTensor]) -> Lora:
    """Find the products that merging a model's active adapters adds, and to which weight.

    Raises:
        LoadError: an adapter that is not plain LoRA, or a weight that is tied; named.
    """
    numbers = {id(tensor.tensor): index for index, tensor in enumerate(tensors)}
    added: dict[int, tuple[Factors, ...]] = {}
    dropped: set[int] = set()
    seen: set[int] = set()
    for index, tensor in enumerate(tensors):
        entry = tensor.registrations[0]
        if tensor.adapter:
            dropped.add(index)
            layer: Any = next(
                (m for m in entry.path if hasattr(m, "merged_adapters")), entry.module
            )
            if id(layer) not in seen:
                seen.add(id(layer))
                factors = _factors(tensor.name, layer, numbers)
                if factors:
                    base = numbers[id(layer.get_base_layer().weight)]
                    _check_weight(tensors[base])
                    added[base] = factors
        elif not _is_in_merged_model(entry):
            dropped.add(index)
    used = {
        number
        for factors in added.values()
        for factor in factors
        for number in (factor.a, factor.b)
    }
    return Lora(added, frozenset(dropped - used))


def as_merged(tensors: Sequence[ModelTensor]) -> list[ModelTensor] | None:
    """The tensors of a model whose active adapters are all merged, under the base's names.

    None if an adapter is not merged, or uses a method that adds to no weight.
    """
    kept: list[ModelTensor] = []
    for tensor in tensors:
        if tensor.adapter:
            if not all(_is_all_merged(entry) for entry in tensor.registrations):
                return None
            continue
        entries = [
            entry._replace(name=merged_name(entry))
            for entry in tensor.registrations
            if _is_in_merged_model(entry)
        ]
        if entries:
            kept.append(replace(tensor, name=entries[0].name, registrations=entries))
    return kept


def _is_all_merged(entry: Registration) -> bool:
    """Return whether the layer of an adapter's tensor holds every active adapter in its weight."""
    # The innermost, because a wrapper around trained rows answers only partly for the layer in it.
    layer: Any = next((m for m in reversed(entry.path) if hasattr(m, "merged_adapters")), None)
    if layer is None or layer.disable_adapters:
        return False
    names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind, ())}
    active = names.intersection(layer.active_adapters)
    return active <= {*layer.merged_adapters} and bool(layer.merged or not active)


def merged_name(entry: Registration) -> str:
    """The name of a tensor's place in the merged model."""
    parts = entry.name.split(".")
    if "modules_to_save" in parts:
        n = parts.index("modules_to_save")
        del parts[n : n + 2]  # together with the adapter's name
    return ".".join(parts)


def _factors(name: str, layer: Any, numbers: Mapping[int, int]) -> tuple[Factors, ...]:
    """The adapters of a layer that are active, and not merged yet.

    Raises:
        LoadError: an adapter that is not plain LoRA.
    """
    kind = plain_class(layer)
    if kind.__name__ not in LORA_KINDS or not kind.__module__.startswith("peft.tuners.lora."):
        what = f"{kind.__module__}.{kind.__name__}"
        raise LoadError(
            f"{name}: is of a {what}, and merge=True adds plain LoRA alone: {MERGE_BEFORE}"
        )
    if layer.disable_adapters:
        raise LoadError(
            f"{name}: its adapters are disabled: enable them, or give the model that PEFT's "
            "unload() leaves, without merge=True"
        )
    factors: list[Factors] = []
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
            raise LoadError(
                f"{name}: has {what}, and merge=True adds plain LoRA alone: {MERGE_BEFORE}"
            )
        a, b = (table[adapter] if is_embedding else table[adapter].weight for table in tables)
        transposed = is_embedding or bool(layer.fan_in_fan_out)
        scaling = float(layer.scaling[adapter])
        factors.append(
            Factors(adapter, numbers[id(a)], numbers[id(b)], scaling, transposed, is_embedding)
        )
    return tuple(factors)


def _check_weight(weight: ModelTensor) -> None:
    """Raise LoadError for a weight to which nothing can be added."""
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise LoadError(f"{weight.name}: is {weight.dtype}, to which no adapter can be added")
    first, *places = weight.registrations
    tied = [entry.name for entry in places if entry.module is not first.module]
    if tied:
        others = ", ".join(tied)
        raise LoadError(
            f"{weight.name}: is tied with {others}, and its adapter changes one of them: untie "
            "them, or leave the layer out of the adapter"
        )


def _is_in_merged_model(entry: Registration) -> bool:
    """Return whether the merged model has a tensor: not the original of a trained copy."""
    parts = entry.raw.split(".")
    for depth, module in enumerate(entry.path):
        copies = module.__dict__["_modules"].get("modules_to_save")
        if copies is not None:
            wrapper: Any = module
            active = next((name for name in wrapper.active_adapters if name in copies), None)
            kept = ["original_module"] if active is None else ["modules_to_save", active]
            return parts[depth : depth + len(kept)] == kept
    return True
