"""PEFT's adapters and their base: merged layers, and initial values of adapters.

An adapter starts with PEFT's initial values, which may depend on the base weights. Those of plain
LoRA do not: A is drawn and B is zeros, or both are drawn. Any other adapter is an error if it is on
meta, or if it would stay while its base is replaced: load the base first, then create the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any

from torch import nn

from anyrank.errors import LoadError
from anyrank.models.dialects.peft.names import is_adapter_layer, is_peft
from anyrank.models.wrappers import ModelTensor, Registration, plain_class
from anyrank.tensors.spec import StoredTensor

BASE_FIRST = "load the base first, then create the adapter"
KNOWN_CHOICES = (True, False, "gaussian")  # values of init_lora_weights that do not need the base
# Others (PiSSA, OLoRA, LoftQ, ...) subtract the adapter's initial values from the base weights.
KEEP_THE_BASE = (*KNOWN_CHOICES, None, "eva", "mica", "orthogonal")
INIT = "init_lora_weights"
# Settings that do not change what the adapter computes: where it was made, and which tensors it
# has, because the tensors themselves are compared.
FREE = frozenset(
    {
        *("base_model_name_or_path", "inference_mode", "revision", "peft_version", "task_type"),
        *("auto_mapping", "modules_to_save", "target_modules", "exclude_modules", "runtime_config"),
        *("layers_to_transform", "layers_pattern", "target_parameters", "ensure_weight_tying"),
    }
)


def merged_layers(targets: Iterable[ModelTensor]) -> list[str]:
    """Return the names of PEFT layers whose base weights contain their adapters.

    `unmerge` of different base weights, or with different adapters, would subtract something that
    was not added.
    """
    return sorted(
        {
            entry.name.rpartition(".")[0]
            for target in targets
            for entry in target.registrations
            if is_below_merged(entry)
        }
    )


def is_below_merged(entry: Registration) -> bool:
    """Return whether a tensor is in a PEFT layer into which an adapter is merged."""
    return any(is_peft(module) and getattr(module, "merged", False) for module in entry.path)


def unknown_adapters(
    tensors: Sequence[ModelTensor],
    stored: Mapping[int, StoredTensor],
    initialize: Collection[int],
    keep: Collection[int],
) -> list[str]:
    """Return the names of adapters, except plain LoRA, that lack initial values or their base.

    The second kind would stay on a different base than the one that they were made for.

    Args:
        tensors: the tensors of the model.
        stored: tensor -> what fills it.
        initialize: tensors that a rule is to fill.
        keep: tensors that keep their values.
    """
    # Layer whose base is filled -> whether from a file of only the base.
    based: dict[int, bool] = {}
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
        # Or it is a buffer that no file has, and that PEFT may have computed.
        stays = index in keep or (index not in stored and tensor.dtype.is_floating_point)
        # PiSSA and others have subtracted the adapter from the base weights.
        of_rest = _choice_of(entry) not in KNOWN_CHOICES and based.get(id(layer), False)
        if index in initialize or (id(layer) in based and stays) or of_rest:
            unknown.append(tensor.name)
    return unknown


def _adapter_layer(entry: Registration) -> nn.Module | None:
    """Return the PEFT layer above a tensor, or the whole PEFT model."""
    return next((m for m in reversed(entry.path) if is_adapter_layer(m)), None)


def lora_rule(
    layer: nn.Module, stand_in: Any, entry: Registration
) -> tuple[str, Callable[[], object]] | None:
    """Return PEFT's rule for a new LoRA factor; None if it keeps the constructor's values.

    Args:
        layer: the PEFT layer of the model, around the adapted module.
        stand_in: the same layer with memory for the tensor.
        entry: the entry of the tensor.

    Raises:
        LoadError: the adapter is not plain LoRA.
    """
    if not _is_plain_lora(entry):
        raise LoadError(
            f"{entry.name}: is missing from the source, and is not plain LoRA; {BASE_FIRST}"
        )
    choice = _choice_of(entry)
    if choice is False:
        return None
    name = f"{plain_class(layer).__name__}.reset_lora_parameters"
    return name, lambda: stand_in.reset_lora_parameters(_adapter_of(entry)[0], choice)


def _is_plain_lora(entry: Registration) -> bool:
    """Return whether a tensor is a LoRA factor whose initial value is known."""
    parts = entry.raw.split(".")
    layer = _adapter_layer(entry)
    is_lora = layer is not None and plain_class(layer).__module__.startswith("peft.tuners.lora.")
    choice = _choice_of(entry)
    if not is_lora or choice not in KNOWN_CHOICES:
        return False
    if {"lora_embedding_A", "lora_embedding_B"}.intersection(parts):
        return choice is not False  # with False they keep the values of torch.randn
    variant = getattr(layer, "lora_variant", {}).get(_adapter_of(entry)[0])  # DoRA and others
    return variant is None and bool({"lora_A", "lora_B"}.intersection(parts))


def _base_changing_choice(choice: object) -> object:
    """Return the `init_lora_weights` if it has changed the base of an adapter, else None."""
    choice = choice.lower() if isinstance(choice, str) else choice  # PEFT ignores case
    return None if choice in KEEP_THE_BASE else choice


def other_settings(config: Any, saved: Mapping[str, Any], free: Collection[str]) -> list[str]:
    """Return the settings with which a model's adapter computes differently than a saved one. load
    and `integrations.peft` check this.

    Args:
        config: configuration of the model's adapter.
        saved: contents of adapter_config.json; missing settings have PEFT's defaults.
        free: settings that may differ.

    Returns:
        A text for each difference.
    """
    others: list[str] = []
    for setting in fields(config):
        name = setting.name
        if name in free or name.endswith("dropout"):
            continue
        default = _default_of(setting)
        now, then = _plain(getattr(config, name)), _plain(saved.get(name, default))
        if name == INIT:
            now, then = _base_changing_choice(now), _base_changing_choice(then)
        if now != then:
            was = saved.get(name, default)
            others.append(f"{name} is {getattr(config, name)!r}, but was saved with {was!r}")
            if name not in saved:
                others[-1] += ", PEFT's default for a missing setting"
    return others


def settings_of(
    filled: Iterable[tuple[ModelTensor, StoredTensor]], saved: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """Return `other_settings` of the adapters that are filled.

    Args:
        filled: tensors that get values, with these values; only those of adapters count. saved:
            index of their file -> the adapter_config.json next to it.
    """
    asked: dict[tuple[int, int], tuple[Any, Mapping[str, Any]]] = {}
    for target, stored in filled if saved else ():
        file = stored.chunks[0].file if stored.chunks else -1
        config = _adapter_of(target.registrations[0])[1] if target.adapter else None
        if file in saved and config is not None:
            asked[file, id(config)] = config, saved[file]
    return sorted({line for pair in asked.values() for line in other_settings(*pair, FREE)})


def _default_of(setting: Field[Any]) -> Any:
    """Return the default of a setting of a configuration."""
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return None if setting.default is MISSING else setting.default


def _plain(value: Any) -> Any:
    """Return a value of a configuration in JSON's form; missing and empty values are the same."""
    value = sorted(value) if isinstance(value, set | frozenset) else value
    value = value.to_dict() if hasattr(value, "to_dict") else value
    value = value.value if isinstance(value, Enum) else value
    return json.loads(json.dumps(value, default=str)) or None


def _adapter_of(entry: Registration) -> tuple[str, Any]:
    """Return the name and the configuration of the adapter to which a tensor belongs."""
    owner: Any = next((module for module in entry.path if hasattr(module, "peft_config")), None)
    configs: Mapping[str, Any] = {} if owner is None else owner.peft_config
    parts = entry.raw.split(".")
    name = next((name for name in configs if name in parts), next(iter(configs), "default"))
    return name, configs.get(name)


def _choice_of(entry: Registration) -> Any:
    """Return how the adapter to which a tensor belongs gets its initial values."""
    return getattr(_adapter_of(entry)[1], INIT, True)
