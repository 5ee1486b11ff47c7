"""The products that a merge of LoRA adapters adds to a model's weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.models.dialects.peft.adapters import is_below_merged
from anyrank.models.dialects.peft.names import is_peft
from anyrank.models.overlaps import twins_of
from anyrank.models.wrappers import ModelTensor, Registration, plain_class

LORA_KINDS = ("Linear", "Embedding")  # classes of peft.tuners.lora whose products can be added
SCALED = ("peft.tuners.lora.", "peft.tuners.loha.", "peft.tuners.lokr.")  # by alpha and r
MERGE_BEFORE = "merge with PEFT (merge_and_unload) first"


def is_merged(tensor: ModelTensor) -> bool:
    """Return whether PEFT has merged an adapter into a base weight, and can unmerge it."""
    return any(
        "base_layer" in entry.raw and is_below_merged(entry) for entry in tensor.registrations
    )


def scaling_of(tensor: ModelTensor) -> float | None:
    """Return PEFT's scaling of the product of LoRA factors, for a tensor that is one of them."""
    layer, adapter = _scaled_layer(tensor)
    return None if adapter is None else float(layer.scaling[adapter])


def other_scales(tensors: Iterable[ModelTensor]) -> list[str]:
    """Return the error texts for adapters whose scaling differs from their configuration. A PEFT
    folder has only the configuration, so load and `integrations.peft` check this.
    """
    lines: list[str] = []
    for tensor in tensors:
        layer, adapter = _scaled_layer(tensor)
        if adapter is None or not plain_class(layer).__module__.startswith(SCALED):
            continue
        as_configured = copy(layer)
        as_configured.scaling = {**layer.scaling}
        as_configured.set_scale(adapter, 1)
        scale, configured = layer.scaling[adapter], as_configured.scaling[adapter]
        if scales_differ(scale, configured):
            lines.append(
                f"{tensor.name}: its adapter is scaled by {scale:g} in the model, but by "
                f"{configured:g} according to its configuration"
            )
    return lines


def scales_differ(scale: float, other: float) -> bool:
    """Return whether two scales differ by more than the rounding of a scale that was multiplied and
    divided again, which diffusers does for a call.
    """
    return not math.isclose(scale, other, rel_tol=1e-9)


def _scaled_layer(tensor: ModelTensor) -> tuple[Any, str | None]:
    """Return the PEFT layer that scales an adapter's tensor, or None; and the adapter's name."""
    path, parts = tensor.registrations[0].path, tensor.name.split(".")
    # The innermost, because a layer around another one has its own scale.
    layer: Any = next((m for m in reversed(path) if is_peft(m) and hasattr(m, "scaling")), None)
    if layer is None or not tensor.adapter:
        return None, None
    return layer, next((name for name in layer.scaling if name in parts), None)


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter of one weight.

    Attributes:
        adapter: name of the adapter.
        a, b: positions of the factors among the model's tensors.
        scaling: PEFT's scaling, including rsLoRA's square root and changes by the user.
        transposed: whether the weight is stored [in, out].
        narrows: whether the product is cast to the weight's dtype before it is added.
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
        added: position of a weight -> its adapters, in the order of the additions.
        dropped: positions of other tensors that a merged model does not have.
    """

    added: Mapping[int, tuple[Factors, ...]]
    dropped: frozenset[int]


def find_lora(tensors: Sequence[ModelTensor]) -> Lora:
    """Find the products that a merge of the active adapters adds, and to which weights.

    Raises:
        LoadError: an adapter is not plain LoRA, or changes only one name of a tied weight.
    """
    numbers = {id(tensor.tensor): index for index, tensor in enumerate(tensors)}
    added: dict[int, tuple[Factors, ...]] = {}
    dropped: set[int] = set()
    seen: set[int] = set()
    adapted: dict[int, list[Any]] = {}  # weight -> the layers that add to it
    twins = {twin: first for twin, (first, _) in twins_of(tensors).items()}
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
                    known = added.setdefault(base, factors)
                    if known is factors or _are_tied(known, factors, twins):
                        adapted.setdefault(base, []).append(layer)
        elif not any(map(_is_in_merged_model, tensor.registrations)):
            dropped.add(index)
    for base, layers in adapted.items():
        _check_weight(tensors[base])
        if problem := changes_one_name(tensors[base], layers):
            raise LoadError(problem)
    used = {
        number
        for factors in added.values()
        for factor in factors
        for number in (factor.a, factor.b)
    }
    return Lora(added, frozenset(dropped - used))


def as_merged(tensors: Sequence[ModelTensor]) -> list[ModelTensor] | None:
    """Return the tensors of a model whose active adapters are all merged, with the base's names.

    Return None if an adapter is not merged, or uses a method that does not change weights.
    """
    kept: list[ModelTensor] = []
    for tensor in tensors:
        if tensor.adapter:
            if not all(_is_all_merged(entry) for entry in tensor.registrations):
                return None
            continue
        names = merged_names(tensor)
        places = filter(_is_in_merged_model, tensor.registrations)
        entries = [entry._replace(name=n) for entry, n in zip(places, names, strict=True)]
        if entries:
            kept.append(replace(tensor, name=entries[0].name, registrations=entries))
    return kept


def _is_all_merged(entry: Registration) -> bool:
    """Return whether the layer of an adapter's tensor has merged every active adapter."""
    # The innermost, because a wrapper around trained rows describes only a part of the inner layer.
    layer: Any = next((m for m in reversed(entry.path) if hasattr(m, "merged_adapters")), None)
    if layer is None or disabled(layer):
        return False
    names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind, ())}
    active = names.intersection(layer.active_adapters)
    return active <= {*layer.merged_adapters} and bool(layer.merged or not active)


def merged_names(tensor: ModelTensor) -> list[str]:
    """Return the names of a tensor in the merged model, which has trained copies as originals."""
    return [_merged_name(entry) for entry in tensor.registrations if _is_in_merged_model(entry)]


def _merged_name(entry: Registration) -> str:
    parts = entry.name.split(".")
    if "modules_to_save" in parts:
        n = parts.index("modules_to_save")
        del parts[n : n + 2]  # and the adapter's name
    return ".".join(parts)


def _factors(name: str, layer: Any, numbers: Mapping[int, int]) -> tuple[Factors, ...]:
    """Return the adapters of a layer that are active and not merged yet.

    Raises:
        LoadError: an adapter is not plain LoRA.
    """
    kind = plain_class(layer)
    if what := other_than_lora(layer):
        raise LoadError(
            f"{name}: belongs to {what}, but merge=True supports only plain LoRA; {MERGE_BEFORE}"
        )
    if problem := disabled(layer):
        raise LoadError(f"{name}: {problem}")
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
        if what := other_than_lora(layer, adapter):
            raise LoadError(
                f"{name}: has {what}, but merge=True supports only plain LoRA; {MERGE_BEFORE}"
            )
        a, b = (table[adapter] if is_embedding else table[adapter].weight for table in tables)
        transposed = is_embedding or bool(layer.fan_in_fan_out)
        scaling = float(layer.scaling[adapter])
        factors.append(
            Factors(adapter, numbers[id(a)], numbers[id(b)], scaling, transposed, is_embedding)
        )
    return tuple(factors)


def disabled(layer: Any) -> str | None:
    """Return the error text for a PEFT layer whose adapters are disabled, or None. sync, convert
    and `integrations.peft.merge` check this.
    """
    if not layer.disable_adapters:
        return None
    return "its adapters are disabled; enable them, or pass the result of PEFT's unload()"


def other_than_lora(layer: Any, adapter: str = "") -> str | None:
    """Return how a PEFT layer, or one of its adapters, differs from plain LoRA; None if it does
    not.

    Args:
        layer: layer of PEFT.
        adapter: adapter of the layer; "" to check only the class.
    """
    kind = plain_class(layer)
    if kind.__name__ not in LORA_KINDS or not kind.__module__.startswith("peft.tuners.lora."):
        return f"a {kind.__module__}.{kind.__name__}"
    if adapter and (variant := layer.lora_variant.get(adapter)) is not None:
        return type(variant).__name__
    return "lora_bias" if adapter and layer.lora_bias[adapter] else None


def _check_weight(weight: ModelTensor) -> None:
    """Raise LoadError for a weight to which no adapter can be added."""
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise LoadError(f"{weight.name}: is {weight.dtype}, to which no adapter can be added")


def changes_one_name(weight: ModelTensor, layers: Sequence[Any]) -> str | None:
    """Return the error text for an adapter that cannot be added to a tied weight; None if all of
    its names have the same adapter. sync and `integrations.peft.merge` check this.

    Args:
        weight: weight of the base.
        layers: PEFT layers, which add the same product to it.
    """
    bases = {id(layer.get_base_layer()) for layer in layers}
    names = [entry.name for entry in weight.registrations if id(entry.module) not in bases]
    if not names:
        return None
    adapted = next(entry.name for entry in weight.registrations if id(entry.module) in bases)
    return (
        f"{adapted}: is tied with {', '.join(names)}, but its adapter changes only one of them. "
        "Untie them first (a copy in the base, tie_word_embeddings=False), adapt both in the same "
        "way (ensure_weight_tying=True), or leave the layer out of the adapter."
    )


def _are_tied(
    factors: Sequence[Factors], others: Sequence[Factors], twins: Mapping[int, int]
) -> bool:
    """Return whether two layers add the same product, because their factors are transposes."""
    if len(factors) != len(others):
        return False
    return all(
        {twins.get(other.a, other.a), twins.get(other.b, other.b)} == {factor.a, factor.b}
        and factor.scaling == other.scaling
        for factor, other in zip(factors, others, strict=True)
    )


def _is_in_merged_model(entry: Registration) -> bool:
    """Return whether the merged model has a tensor: not if it is the original of a trained copy."""
    parts = entry.raw.split(".")
    for depth, module in enumerate(entry.path):
        copies = module.__dict__["_modules"].get("modules_to_save")
        if copies is not None:
            wrapper: Any = module
            active = next((name for name in wrapper.active_adapters if name in copies), None)
            kept = ["original_module"] if active is None else ["modules_to_save", active]
            return parts[depth : depth + len(kept)] == kept
    return True
