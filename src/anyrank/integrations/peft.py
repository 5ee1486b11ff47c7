"""PEFT adapters in sharded and wrapped models: exported and loaded as PEFT's own folders, merged.

Tested with peft 0.21. A run that leaves the frozen base out is `anyrank.TrainState(base=...)`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, onload_layer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.models.dialects.peft.adapters import FREE, INIT, other_settings
from anyrank.models.dialects.peft.merging import (
    changes_one_name,
    disabled,
    other_scales,
    other_than_lora,
)
from anyrank.models.tensors import find_tensors
from anyrank.versions import warn_if_untested
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks, open_ranks

__all__ = ["load", "merge", "save"]

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"

warn_if_untested("peft")


def save(model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None) -> None:
    """Write an adapter as a PEFT folder, from a model under FSDP2, DDP or none. All ranks.

    The folder equals the one that `save_pretrained` writes for the adapter:
    `PeftModel.from_pretrained(base, folder)` reads it on any machine. Only the adapter's own
    tensors are gathered, one at a time, and the first rank writes them. Existing files are replaced
    once the new ones are whole.

    Args:
        model: a PeftModel, or a wrapper of one.
        folder: created if it does not exist.
        adapter: its name in the model; default: the active one.

    Raises:
        ValueError: not a PeftModel; no such adapter; several are active, and none is named; a
            method whose saved values PEFT computes; an adapter that the model scales otherwise
            than its configuration says.
        CheckpointError: the first rank could not write.
        RankError: a rank failed otherwise, for example without memory for a tensor.
        All of them on all ranks; the folder is then as it was before.

    Example::

        import peft

        base = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        anyrank.integrations.peft.save(model, "adapter")
        anyrank.integrations.peft.load(model, "adapter")
    """
    path = os.fspath(folder)
    with open_ranks(call="peft.save()") as ranks:
        chosen = _agreed(ranks, "peft.save", model, path, adapter)
        is_first = ranks.index == 0
        weights = ranks.run(
            "making room for the adapter", chosen.room if is_first else lambda: None
        )
    anyrank.sync(weights, chosen.tensors)
    with open_ranks(call="peft.save()") as ranks:
        ranks.run(
            "writing the adapter",
            lambda: None if weights is None else _write(path, weights, chosen.config),
        )


def load(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None
) -> anyrank.LoadReport:
    """Fill an adapter from a PEFT folder, in a model under FSDP2, DDP or none. All ranks.

    The base stays as it is. Each rank reads its own share.

    Args:
        model: a PeftModel, or a wrapper of one, with an adapter of the same configuration.
        folder: a folder of `save` or of PEFT's `save_pretrained`, in any of its formats.
        adapter: its name in the model; it has to be the active one, as it is by default.

    Returns:
        The report of `anyrank.load`.

    Raises:
        ValueError: not a PeftModel; no such active adapter; a configuration, or a scale of the
            model, that computes something else (r, lora_alpha, scale_layer(), ...). Raised before
            anything changes.
        LoadError: tensors that are missing, unexpected or of another shape; first values that
            changed the base in another way (PiSSA, OLoRA, ...). Raised before anything changes.

    Example::

        import peft

        def adapted():
            base = torch.nn.Sequential(torch.nn.Linear(4, 4))
            return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))

        anyrank.integrations.peft.save(adapted(), "adapter")
        report = anyrank.integrations.peft.load(adapted(), "adapter")
        assert report.tensors == 2
    """
    path = os.fspath(folder)
    with open_ranks(call="peft.load()", may_be_alone=True) as ranks:
        chosen = _agreed(ranks, "peft.load", model, path, adapter)
        source, saved, keys = ranks.run_on_one("reading the adapter's folder", lambda: _read(path))
        # The load of a folder compares what the first values took out of the base.
        free = {*FREE, INIT} if source == path else FREE
        compare_arguments(
            ranks, "peft.load", {}, anyrank.LoadError, lambda: chosen.check(path, saved, keys, free)
        )
    return anyrank.load(model, source, missing="keep")


def merge(model: nn.Module, *, adapter: str | None = None) -> nn.Module:
    """Add an adapter to the base's weights, in place and sharded as they are. All ranks.

    For a model under FSDP2 each rank adds its own rows of LoRA's product; other models go through
    PEFT's own merge. Afterwards the layers compute with the base's weights alone, until
    `unmerge_adapter()`.

    Args:
        model: a PeftModel, or a wrapper of one.
        adapter: its name in the model; default: the active one.

    Returns:
        The PeftModel itself, without wrappers.

    Raises:
        ValueError: no PeftModel, no such adapter; merged already, or disabled; a weight that is
            tied; a layer that PEFT cannot merge; a sharded adapter that is not plain LoRA on linear
            layers and embeddings; a sum that is not finite. Nothing has changed then.

    Example::

        import peft

        base = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        merged = anyrank.integrations.peft.merge(model)
        assert merged.base_model.model[0].merged
    """
    inner: Any = _peft_model(model)
    adapter = _named(inner, adapter)
    layers: list[Any] = [
        module
        for module in inner.modules()
        if isinstance(module, BaseTunerLayer) and adapter in _adapters_in(module)
    ]
    if not layers:
        raise ValueError(
            f"{adapter!r} adds to no weight of the model, so there is nothing to merge"
        )
    if any(layer.merged for layer in layers):
        raise ValueError(f"an adapter is merged already: call unmerge_adapter() before {adapter!r}")
    for layer in layers:
        if problem := disabled(layer):
            raise ValueError(f"{_name_of(inner, layer)}: {problem}")
    _check_ties(inner, layers)
    if not any(hasattr(parameter, "placements") for parameter in inner.parameters()):
        for layer in layers:  # twice: nothing may change before all layers are known to merge
            _try_merge(inner, layer, adapter)
        inner.merge_adapter(adapter_names=[adapter], safe_merge=True)
        return inner
    for layer in layers:
        if what := other_than_lora(layer, adapter):
            raise ValueError(
                f"{_name_of(inner, layer)}: has {what}, and only plain LoRA is merged while "
                "sharded: save() the adapter, and merge it into a whole model"
            )
    with torch.no_grad():
        finite = True
        for layer in layers:  # twice: nothing may change before all sums are known to be finite
            finite &= bool(_sum(layer, adapter).isfinite().all())
        with open_ranks(call="peft.merge()", may_be_alone=True) as ranks:
            finite = not ranks.any("adding the adapter", not finite)
        if not finite:
            raise ValueError(f"{adapter!r}: the merged weights have NaN or infinite values")
        for layer in layers:
            _local(layer.get_base_layer().weight).copy_(_sum(layer, adapter))
            layer.merged_adapters.append(adapter)
    return inner


def _check_ties(model: PeftModel, layers: Sequence[Any]) -> None:
    """Refuse an adapter that would change a tied weight under a name that it does not adapt, or
    once for each name.

    Raises:
        ValueError: names the weight.
    """
    adding = [layer for layer in layers if hasattr(layer.get_base_layer(), "weight")]
    by_weight: dict[int, list[Any]] = {}
    for layer in adding:
        by_weight.setdefault(id(layer.get_base_layer().weight), []).append(layer)
    for tensor in find_tensors(model):
        layers_here = by_weight.get(id(tensor.tensor), [])
        if not layers_here or not isinstance(layers_here[0], LoraLayer):
            continue
        if problem := changes_one_name(tensor, layers_here):
            raise ValueError(problem)
        if len(layers_here) > 1:
            raise ValueError(
                f"{tensor.name}: is tied, and {len(layers_here)} layers would add the adapter to "
                "it, one after the other: merge by anyrank.sync(merge=True) into another model, "
                "which adds it once"
            )


def _try_merge(model: PeftModel, layer: Any, adapter: str) -> None:
    """Merge an adapter into one layer by PEFT, and put back what was there.

    Raises:
        ValueError: PEFT cannot merge it; names the layer.
    """
    modules = {module: {**module.__dict__} for module in layer.modules()}
    for was in modules.values():
        was |= {key: copy(value) for key, value in was.items() if type(value) in (dict, list)}
    values = {tensor: tensor.data for tensor in (*layer.parameters(), *layer.buffers())}
    try:
        with onload_layer(layer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the merge that counts gives them again
            layer.merge(adapter_names=[adapter], safe_merge=True)
    except Exception as error:  # PEFT's own code, of any method
        raise ValueError(
            f"{_name_of(model, layer)}: PEFT cannot merge {adapter!r} into it: {error}"
        ) from error
    finally:
        for module, was in modules.items():
            module.__dict__.clear()
            module.__dict__.update(was)
        for tensor, data in values.items():
            tensor.data = data


def _name_of(model: PeftModel, layer: nn.Module) -> str:
    """Where a model has a layer."""
    return next(name for name, module in model.named_modules() if module is layer)


def _sum(layer: Any, adapter: str) -> torch.Tensor:
    """This rank's part of a layer's merged weight."""
    weight = layer.get_base_layer().weight
    delta = layer.get_delta_weight(adapter)
    if hasattr(weight, "placements"):
        delta = delta.redistribute(weight.device_mesh, weight.placements)
    return _local(weight) + _local(delta).to(weight.dtype)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part, to be written to in place."""
    plain = tensor.detach()
    return plain.to_local() if hasattr(plain, "placements") else plain


def _adapters_in(layer: Any) -> set[str]:
    """The adapters of a layer."""
    return {name for kind in layer.adapter_layer_names for name in getattr(layer, kind, ())}


def _peft_model(model: nn.Module) -> PeftModel:
    """The PeftModel in the wrappers of DDP and torch.compile.

    Raises:
        ValueError: there is none.
    """
    for part in model.modules():
        if isinstance(part, PeftModel):
            return part
    raise ValueError(f"{type(model).__name__} holds no PeftModel: give what get_peft_model returns")


def _named(model: PeftModel, adapter: str | None) -> str:
    """The name of the adapter to use.

    Raises:
        ValueError: no such adapter; several are active, and none is named.
    """
    names: list[str] = model.active_adapters if adapter is None else [adapter]
    if len(names) != 1:
        raise ValueError(f"adapters {names} are active: name one with adapter=")
    if names[0] not in model.peft_config:
        raise ValueError(f"no adapter {names[0]!r}: the model has {sorted(model.peft_config)}")
    return names[0]


@dataclass(frozen=True)
class _Adapter:
    """An adapter of a model: its PeftModel, its name, and its tensors by their keys in a folder."""

    model: PeftModel
    name: str
    tensors: dict[str, torch.Tensor]

    @property
    def config(self) -> PeftConfig:
        """The configuration that it was created with."""
        return self.model.peft_config[self.name]

    def room(self) -> dict[str, torch.Tensor]:
        """Memory of this process for the whole tensors."""
        return {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for key, tensor in self.tensors.items()
        }

    def check(
        self, path: str, saved: dict[str, Any], keys: set[str], free: Collection[str]
    ) -> None:
        """Compare it with a folder; settings that are `free` may differ.

        Raises:
            ValueError: it is not active, or its configuration computes otherwise.
            LoadError: the folder lacks tensors.
        """
        if self.name not in self.model.active_adapters:
            raise ValueError(
                f"{self.name!r} is not active: call model.set_adapter({self.name!r}) first"
            )
        if others := other_settings(self.config, saved, free):
            raise ValueError(
                f"{path}: the model's adapter computes otherwise: {'; '.join(others)}: make the "
                "adapter with PeftConfig.from_pretrained(folder)"
            )
        missing, others = sorted(self.tensors.keys() - keys), sorted(keys - self.tensors.keys())
        if missing:
            has = f", and has {len(others)} others, the first {others[0]}" if others else ""
            raise anyrank.LoadError(
                f"{path}: lacks {len(missing)} tensors of the adapter, the first "
                f"{missing[0]}{has}: where they begin differently, make the adapter around the "
                "same module as the folder's, or write its keys as the model's; where they end "
                "differently, give the adapter the target_modules and modules_to_save of the "
                "folder's configuration"
            )


def _agreed(ranks: Ranks, call: str, model: nn.Module, path: str, adapter: str | None) -> _Adapter:
    """The adapter on which all ranks agree. All ranks.

    Raises:
        ValueError: as for `save`, on all ranks.
        LoadError: ranks give different folders or adapters.
    """
    chosen: list[_Adapter] = []

    def check() -> None:
        inner = _peft_model(model)
        name = _named(inner, adapter)
        own_tensors = (tensor for tensor in find_tensors(inner) if name in tensor.name.split("."))
        if scales := other_scales(own_tensors):
            raise ValueError(
                f"{scales[0]} ({len(scales)} tensors), which alone a folder holds: call "
                f"set_scale({name!r}, 1) of its layers, or make it with the scale that is meant"
            )
        tensors = inner.state_dict()
        keys = _keys_in_folder(inner, tensors, name)
        chosen.append(_Adapter(inner, name, {key: tensors[keys[key]].detach() for key in keys}))

    compare_arguments(ranks, call, {"folder": path, "adapter": adapter}, anyrank.LoadError, check)
    return chosen[0]


def _keys_in_folder(model: PeftModel, tensors: dict[str, Any], adapter: str) -> dict[str, str]:
    """Key in a PEFT folder -> name in the model, for each tensor that PEFT saves of an adapter.

    PEFT chooses among tensors without values, so that it gathers none.

    Raises:
        ValueError: PEFT saves a value that it computes from them.
    """
    config = model.peft_config[adapter]
    if config.is_prompt_learning:
        raise _computed_error(config, adapter, "prompt_embeddings")
    outline = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    names = {id(tensor): name for name, tensor in outline.items()}
    chosen = get_peft_model_state_dict(
        model, state_dict=outline, adapter_name=adapter, save_embedding_layers=False
    )
    computed = sorted(key for key, tensor in chosen.items() if id(tensor) not in names)
    if computed:
        raise _computed_error(config, adapter, computed[0])
    return {key: names[id(chosen[key])] for key in sorted(chosen)}


def _computed_error(config: PeftConfig, adapter: str, key: str) -> ValueError:
    """The error for an adapter of which PEFT saves a computed value."""
    return ValueError(
        f"{adapter!r} is of {config.peft_type}, of which PEFT saves {key}, which is not a tensor "
        "of the model: save it with PEFT (save_pretrained), from a model that is whole; "
        "anyrank.load reads the file into a model that has such an adapter"
    )


def _read(folder: str) -> tuple[str, dict[str, Any], set[str]]:
    """The source to load from a PEFT folder, its configuration, and the keys of its tensors.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    try:
        config = PeftConfig.from_pretrained(folder).to_dict()
        try:
            source, listing = folder, anyrank.inspect(folder)
        except anyrank.LoadError:
            # Other weights beside the adapter's own file, such as a whole model, leave no doubt
            # here.
            paths = [os.path.join(folder, name) for name in (WEIGHTS, PICKLE)]
            source = next((path for path in paths if os.path.exists(path)), folder)
            listing = anyrank.inspect(source)
        return source, config, {tensor.name for tensor in listing.tensors}
    except (OSError, ValueError, anyrank.LoadError) as error:
        raise anyrank.LoadError(
            f"{folder}: no adapter can be read from it, which takes adapter_config.json and "
            f"{WEIGHTS} or {PICKLE}: {error}"
        ) from error


def _write(folder: str, weights: dict[str, torch.Tensor], config: PeftConfig) -> None:
    """Write the files of an adapter; each is replaced once it is whole, the configuration last.

    Raises:
        CheckpointError: they cannot be written.
    """
    path = os.path.join(folder, WEIGHTS)
    was, config.inference_mode = config.inference_mode, True  # PEFT writes it like this
    try:
        os.makedirs(folder, exist_ok=True)
        save_file(weights, f"{path}.part", metadata={"format": "pt"})
        with open(f"{path}.part", "rb+") as file:
            os.fsync(file.fileno())
        os.replace(f"{path}.part", path)
        config.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise anyrank.CheckpointError(f"{folder}: cannot write the adapter: {error}") from error
    finally:
        config.inference_mode = was
