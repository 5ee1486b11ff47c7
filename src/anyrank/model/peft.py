"""All that anyrank knows of PEFT's modules: names, an adapter's first values, its products.

PEFT has no public interface for what is asked here, so this file looks at its modules' attributes,
and is the only one of the core that does. What a key alone says of PEFT is in `tensors/names.py`.

An adapter begins as PEFT makes it, which may depend on the base weights. Of plain LoRA it does not:
A is drawn, B is zeros, or both are drawn. Every other adapter is refused where it is on meta, or
would stay while its base is exchanged: the base is loaded first, and the adapter made after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from anyrank.errors import LoadError
from anyrank.model.wrappers import ModelTensor, Path, Registration, plain_class, plain_of
from anyrank.tensors.names import PEFT_SEGMENTS
from anyrank.tensors.spec import StoredTensor
from anyrank.versions import warn_if_untested

BASE_FIRST = "load the base first, then make the adapter"
KNOWN_CHOICES = (True, False, "gaussian")  # of init_lora_weights, whose values need no base
PROMPTS = ["prompt_encoder", "embedding", "weight"]  # of the prompt methods, but for the adapter
LORA_KINDS = ("Linear", "Embedding")  # of peft.tuners.lora, whose products `merge=True` adds
MERGE_BEFORE = "merge with PEFT (merge_and_unload) before"


# -- names ----------------------------------------------------------------------------------------


def is_peft(module: nn.Module) -> bool:
    """Whether a module's class is of PEFT."""
    return _is_peft_class(type(module))


@cache
def _is_peft_class(kind: type[nn.Module]) -> bool:
    return plain_of(kind).__module__.startswith("peft.")


def is_peft_wrapping(module: nn.Module, child: str) -> bool:
    """Whether a child's name is the doing of PEFT, and not of the model's author."""
    if not is_peft(module):
        return False
    if child == "base_model":
        return hasattr(module, "peft_config")
    if child == "model":  # in PEFT's middle layer, between PeftModel and the user's model
        return hasattr(module, "targeted_module_names")
    return child in PEFT_SEGMENTS or child == "token_adapter"


def saved_names(name: str, unwrapped: str, path: Path) -> tuple[str, ...]:
    """The names, without the adapter's, under which PEFT saves a tensor.

    Args:
        name, unwrapped, path: see `Registration`.
    """
    warn_if_untested("peft")
    layer = next((m for m in path if is_adapter_layer(m)), None)
    active: set[str] = set(getattr(layer, "active_adapters", ()))
    if len(active) != 1 or active.isdisjoint(name.split(".")):
        return ()
    long, short = (
        [part for part in full.split(".") if part not in active] for full in (unwrapped, name)
    )
    names = [long, short, [part for part in short if part != "modules_to_save"]]
    if short[-2:] == ["lora_magnitude_vector", "weight"]:  # PEFT saves it as the vector
        names.append(short[:-1])
    if short == PROMPTS and _is_saved_whole(path[-2]):
        names.append(["prompt_embeddings"])
    return tuple(".".join(parts) for parts in names)


def _is_saved_whole(encoder: nn.Module) -> bool:
    """Whether PEFT saves the embedding of a prompt encoder, and not what others compute of it."""
    return all(name == "embedding" for name, _ in encoder.named_children()) and not any(
        True for _ in encoder.parameters(recurse=False)
    )


def is_adapter(entry: Registration) -> bool:
    """Whether a tensor belongs to an adapter: below a PEFT layer, and not in what that wraps, or
    beside the model in what holds all of it (prompts, tables that layers share).
    """
    parts = entry.raw.split(".")
    for depth, module in enumerate(entry.path):
        below = parts[depth:]
        if not is_peft(module):
            continue
        if hasattr(module, "peft_config") or hasattr(module, "targeted_module_names"):
            if not is_peft_wrapping(module, below[0]):
                return True
        elif hasattr(module, "active_adapters"):
            return not PEFT_SEGMENTS.intersection(below) and "modules_to_save" not in below
    return False


# -- adapters and the base under them --------------------------------------------------------------


def merged_layers(targets: Iterable[ModelTensor]) -> list[str]:
    """PEFT's layers whose base weights hold their adapters: what `unmerge` would take out of other
    base weights, or with other adapters, is not what was put in.
    """
    return sorted(
        {
            entry.name.rpartition(".")[0]
            for target in (targets if "peft" in sys.modules else ())
            for entry in target.registrations
            if _is_below_merged(entry)
        }
    )


def is_merged(tensor: ModelTensor) -> bool:
    """Whether PEFT has added an adapter to a base weight, and keeps it to take it off again."""
    return any(
        "base_layer" in entry.raw and _is_below_merged(entry) for entry in tensor.registrations
    )


def _is_below_merged(entry: Registration) -> bool:
    return any(is_peft(module) and getattr(module, "merged", False) for module in entry.path)


def scaling_of(tensor: ModelTensor) -> float | None:
    """What PEFT multiplies the product of a LoRA layer's factors by, of which this is one."""
    if not tensor.adapter:
        return None
    path, parts = tensor.registrations[0].path, tensor.name.split(".")
    layer: Any = next((m for m in path if is_peft(m) and hasattr(m, "scaling")), None)
    scalings: Mapping[str, Any] = {} if layer is None else layer.scaling
    return next((float(factor) for name, factor in scalings.items() if name in parts), None)


def unknown_adapters(
    tensors: Sequence[ModelTensor],
    stored: Mapping[int, StoredTensor],
    initialise: Collection[int],
    keep: Collection[int],
) -> list[str]:
    """Names of adapters that are not plain LoRA, and would need first values, or would stay on
    another base than they were made for.

    Args:
        tensors: of the model.
        stored: tensor -> what fills it.
        initialise: tensors that a rule is to fill.
        keep: tensors that keep their values.
    """
    based: dict[int, bool] = {}  # layer whose base is filled -> from a file of the base alone
    for index, source in stored.items() if any(t.adapter for t in tensors) else ():
        for entry in () if tensors[index].adapter else tensors[index].registrations:
            layer = _adapter_layer(entry)
            if layer is not None:
                is_plain = "base_layer" not in source.name.split(".")
                based[id(layer)] = based.get(id(layer), False) or is_plain
    unknown: list[str] = []
    for index, tensor in enumerate(tensors):
        entry = tensor.registrations[0]
        if not tensor.adapter or _is_plain_lora(entry):
            continue
        layer = _adapter_layer(entry)
        # Or is a buffer that no file holds, and that PEFT may have computed.
        stays = index in keep or (index not in stored and tensor.dtype.is_floating_point)
        # PiSSA and others have taken the adapter out of the base weights.
        of_rest = _adapter_of(entry)[1] not in KNOWN_CHOICES and based.get(id(layer), False)
        if index in initialise or (id(layer) in based and stays) or of_rest:
            unknown.append(tensor.name)
    return unknown


def _adapter_layer(entry: Registration) -> nn.Module | None:
    """The PEFT layer that a tensor is below, or the whole PEFT model."""
    return next((m for m in reversed(entry.path) if is_adapter_layer(m)), None)


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that PEFT has put around one of the model's."""
    return is_peft(module) and hasattr(module, "active_adapters")


def lora_rule(
    layer: nn.Module, stand_in: Any, entry: Registration
) -> tuple[str, Callable[[], object]] | None:
    """PEFT's rule for a factor of a new LoRA adapter; None where it leaves what construction gave.

    Args:
        layer: of the model, around the module that is adapted.
        stand_in: the same layer with memory for the tensor that is wanted.
        entry: where the tensor is.

    Raises:
        LoadError: another adapter.
    """
    if not _is_plain_lora(entry):
        raise LoadError(f"{entry.name}: is not in the source, and is no plain LoRA: {BASE_FIRST}")
    adapter, choice = _adapter_of(entry)
    if choice is False:
        return None
    name = f"{plain_class(layer).__name__}.reset_lora_parameters"
    return name, lambda: stand_in.reset_lora_parameters(adapter, choice)


def _is_plain_lora(entry: Registration) -> bool:
    """Whether a tensor is a factor of LoRA whose first value is known."""
    parts = entry.raw.split(".")
    layer = _adapter_layer(entry)
    is_lora = layer is not None and plain_class(layer).__module__.startswith("peft.tuners.lora.")
    adapter, choice = _adapter_of(entry)
    if not is_lora or choice not in KNOWN_CHOICES:
        return False
    if {"lora_embedding_A", "lora_embedding_B"}.intersection(parts):
        return choice is not False  # which leaves them as torch.randn made them
    variant = getattr(layer, "lora_variant", {}).get(adapter)  # DoRA and others
    return variant is None and bool({"lora_A", "lora_B"}.intersection(parts))


def _adapter_of(entry: Registration) -> tuple[str, Any]:
    """The name of the adapter that a tensor belongs to, and its `init_lora_weights`."""
    owner: Any = next((module for module in entry.path if hasattr(module, "peft_config")), None)
    configs: Mapping[str, Any] = {} if owner is None else owner.peft_config
    parts = entry.raw.split(".")
    name = next((name for name in configs if name in parts), next(iter(configs), "default"))
    return name, getattr(configs.get(name), "init_lora_weights", True)


# -- what merging adds ----------------------------------------------------------------------------


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
        elif not _is_saved_copy(entry):
            dropped.add(index)
    used = {
        number
        for factors in added.values()
        for factor in factors
        for number in (factor.a, factor.b)
    }
    return Lora(added, frozenset(dropped - used))


def merged_name(entry: Registration) -> str:
    """The name of a place in the merged model."""
    parts = entry.name.split(".")
    if "modules_to_save" in parts:
        n = parts.index("modules_to_save")
        del parts[n : n + 2]  # with the adapter's name
    return ".".join(parts)


def _factors(name: str, layer: Any, numbers: Mapping[int, int]) -> tuple[Factors, ...]:
    """The adapters of a layer that are active, and not merged yet.

    Raises:
        LoadError: one that is not plain LoRA.
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
    """Raises LoadError: a weight to which nothing can be added."""
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


def _is_saved_copy(entry: Registration) -> bool:
    """Whether the merged model has a tensor: not the original of a copy that was trained."""
    parts = entry.raw.split(".")
    for depth, module in enumerate(entry.path):
        copies = module.__dict__["_modules"].get("modules_to_save")
        if copies is not None:
            wrapper: Any = module
            active = next((name for name in wrapper.active_adapters if name in copies), None)
            kept = ["original_module"] if active is None else ["modules_to_save", active]
            return parts[depth : depth + len(kept)] == kept
    return True
