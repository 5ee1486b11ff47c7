"""PEFT adapters in sharded and wrapped models: save and load PEFT's own folders, and merge.

Tested with peft 0.21. To save a run without its frozen base, use `anyrank.TrainState(base=...)`.
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
from anyrank.wording import count
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks, open_ranks

__all__ = ["load", "merge", "save"]

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"

warn_if_untested("peft")


def save(model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None) -> None:
    """Write an adapter as a PEFT folder, from a model under FSDP2, DDP or no wrapper.

    Collective: every rank must call it. The folder equals the one that `save_pretrained` writes for
    the adapter: `PeftModel.from_pretrained(base, folder)` reads it on any machine. Only the
    adapter's own tensors are gathered, one at a time, and the first rank writes them. As with PEFT,
    these include the embeddings if the model has a different vocabulary than its base, whose
    configuration must be on the first rank's machine. Existing files are replaced once the new ones
    are complete.

    Args:
        model: a PeftModel, or a wrapper of one.
        folder: path of the folder; created if it does not exist.
        adapter: name of the adapter in the model; default: the active one.

    Raises:
        ValueError: not a PeftModel; no such adapter; several are active, and `adapter` is None; a
            method whose saved values PEFT computes; an adapter whose scale in the model differs
            from its configuration.
        CheckpointError: the first rank could not write.
        RankError: a rank failed with a different error, such as too little memory for a tensor.
        All errors are raised on every rank, and leave the folder unchanged.

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
        is_resized = ranks.run_on_one(
            "reading the base's vocabulary", lambda: _is_resized(chosen.model, chosen.config)
        )
        if is_resized:
            chosen = _chosen(chosen.model, chosen.name, with_embeddings=True)
        is_first = ranks.index == 0
        weights = ranks.run(
            "allocating memory for the adapter", chosen.room if is_first else lambda: None
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
    """Fill an adapter from a PEFT folder, in a model under FSDP2, DDP or no wrapper.

    Collective: every rank must call it. The base is unchanged. Each rank reads its own share.

    Args:
        model: a PeftModel, or a wrapper of one, with an adapter of the same configuration.
        folder: a folder of `save` or of PEFT's `save_pretrained`, in any of its formats.
        adapter: name of the adapter in the model; must be active; default: the active one.

    Returns:
        The report of `anyrank.load`.

    Raises:
        ValueError: not a PeftModel; no such active adapter; a configuration, or a scale in the
            model, with a different result (r, lora_alpha, scale_layer(), ...). Raised before
            anything changes.
        LoadError: tensors that are missing, unexpected or of a different shape; initial values that
            changed the base differently (PiSSA, OLoRA, ...). Raised before anything changes.

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
        # The load of a folder compares what the initial values have taken out of the base.
        free = {*FREE, INIT} if source == path else FREE
        compare_arguments(
            ranks, "peft.load", {}, anyrank.LoadError, lambda: chosen.check(path, saved, keys, free)
        )
    return anyrank.load(model, source, missing="keep")


def merge(model: nn.Module, *, adapter: str | None = None) -> nn.Module:
    """Merge an adapter into the base's weights, in place; sharded weights stay sharded.

    Collective: every rank must call it. For a model under FSDP2, each rank adds its own rows of
    LoRA's product; for other models, PEFT merges. Afterwards the layers compute only with the
    base's weights, until `unmerge_adapter()`.

    Args:
        model: a PeftModel, or a wrapper of one.
        adapter: name of the adapter in the model; default: the active one.

    Returns:
        The PeftModel itself, without wrappers.

    Raises:
        ValueError: not a PeftModel; no such adapter; an adapter that is already merged, or
            disabled; a tied weight; a layer that PEFT cannot merge; a sharded adapter that is not
            plain LoRA on linear layers and embeddings; a sum that is not finite. Nothing changes.

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
            f"adapter {adapter!r} changes no weight of the model, so there is nothing to merge"
        )
    if any(layer.merged for layer in layers):
        raise ValueError(
            f"an adapter is already merged. Call unmerge_adapter() before you merge {adapter!r}"
        )
    for layer in layers:
        if problem := disabled(layer):
            raise ValueError(f"{_name_of(inner, layer)}: {problem}")
    _check_ties(inner, layers)
    if not any(hasattr(parameter, "placements") for parameter in inner.parameters()):
        for layer in layers:  # two passes: nothing may change before all layers are known to merge
            _try_merge(inner, layer, adapter)
        inner.merge_adapter(adapter_names=[adapter], safe_merge=True)
        return inner
    for layer in layers:
        if what := other_than_lora(layer, adapter):
            raise ValueError(
                f"{_name_of(inner, layer)}: has {what}, but only plain LoRA can be merged while "
                "sharded. Call save() for the adapter, and merge it into an unsharded model"
            )
    with torch.no_grad():
        finite = True
        for (
            layer
        ) in layers:  # two passes: nothing may change before all sums are known to be finite
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
    """Check that an adapter does not change a tied weight for only one name, or once per name.

    Raises:
        ValueError: it does; the error names the weight.
    """
    adding = [layer for layer in layers if hasattr(layer.get_base_layer(), "weight")]
    by_weight: dict[int, list[Any]] = {}
    for layer in adding:
        by_weight.setdefault(id(layer.get_base_layer().weight), []).append(layer)
    for tensor in find_tensors(model, with_packed=True):
        layers_here = by_weight.get(id(tensor.tensor), [])
        if not layers_here or not isinstance(layers_here[0], LoraLayer):
            continue
        if problem := changes_one_name(tensor, layers_here):
            raise ValueError(problem)
        if len(layers_here) > 1:
            raise ValueError(
                f"{tensor.name}: is tied, so {len(layers_here)} layers would each add the adapter "
                "to it. Merge into a different model with anyrank.sync(merge=True), which adds it "
                "once. Layers with adapters of their own first need weights of their own (a copy "
                "for each)"
            )


def _try_merge(model: PeftModel, layer: Any, adapter: str) -> None:
    """Merge an adapter into one layer with PEFT, and restore the layer.

    Raises:
        ValueError: PEFT cannot merge it; the error names the layer.
    """
    modules = {module: {**module.__dict__} for module in layer.modules()}
    for was in modules.values():
        was |= {key: copy(value) for key, value in was.items() if type(value) in (dict, list)}
    values = {tensor: tensor.data for tensor in (*layer.parameters(), *layer.buffers())}
    try:
        with onload_layer(layer), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real merge repeats them
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
    """Return the name of a layer in a model."""
    return next(name for name, module in model.named_modules() if module is layer)


def _sum(layer: Any, adapter: str) -> torch.Tensor:
    """Return this rank's part of a layer's merged weight."""
    weight = layer.get_base_layer().weight
    delta = layer.get_delta_weight(adapter)
    if hasattr(weight, "placements"):
        delta = delta.redistribute(weight.device_mesh, weight.placements)
    return _local(weight) + _local(delta).to(weight.dtype)


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, for writing in place."""
    plain = tensor.detach()
    return plain.to_local() if hasattr(plain, "placements") else plain


def _adapters_in(layer: Any) -> set[str]:
    """Return the names of a layer's adapters."""
    return {name for kind in layer.adapter_layer_names for name in getattr(layer, kind, ())}


def _peft_model(model: nn.Module) -> PeftModel:
    """Return the PeftModel inside the wrappers of DDP and torch.compile.

    Raises:
        ValueError: there is none.
    """
    for part in model.modules():
        if isinstance(part, PeftModel):
            return part
    raise ValueError(
        f"{type(model).__name__} does not contain a PeftModel. Pass the model that "
        "get_peft_model() returns"
    )


def _named(model: PeftModel, adapter: str | None) -> str:
    """Return the name of the adapter to use.

    Raises:
        ValueError: no such adapter; several are active, and `adapter` is None.
    """
    names: list[str] = model.active_adapters if adapter is None else [adapter]
    if len(names) != 1:
        raise ValueError(f"adapters {names} are active. Select one with adapter=")
    if names[0] not in model.peft_config:
        raise ValueError(
            f"adapter={names[0]!r}: no such adapter; the model has {sorted(model.peft_config)}"
        )
    return names[0]


@dataclass(frozen=True)
class _Adapter:
    """An adapter of a model: its PeftModel, its name, and its tensors by their keys in a folder."""

    model: PeftModel
    name: str
    tensors: dict[str, torch.Tensor]

    @property
    def config(self) -> PeftConfig:
        """The configuration with which it was created."""
        return self.model.peft_config[self.name]

    def room(self) -> dict[str, torch.Tensor]:
        """Allocate host memory for the whole tensors."""
        return {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for key, tensor in self.tensors.items()
        }

    def check(
        self, path: str, saved: dict[str, Any], keys: set[str], free: Collection[str]
    ) -> None:
        """Compare it with a folder; settings in `free` may differ.

        Raises:
            ValueError: it is not active, or its configuration gives a different result.
            LoadError: the folder lacks tensors.
        """
        if self.name not in self.model.active_adapters:
            raise ValueError(
                f"adapter {self.name!r} is not active. Call model.set_adapter({self.name!r}) first"
            )
        if others := other_settings(self.config, saved, free):
            raise ValueError(
                f"{path}: the adapter configuration of the model differs from the folder's "
                f"({'; '.join(others)}). Create the adapter with PeftConfig.from_pretrained(folder)"
            )
        missing, others = sorted(self.tensors.keys() - keys), sorted(keys - self.tensors.keys())
        if missing:
            extra = count(len(others), "unexpected one")
            has = f", and has {extra} (such as {others[0]})" if others else ""
            raise anyrank.LoadError(
                f"{path}: lacks {count(len(missing), 'tensor')} of the adapter (such as "
                f"{missing[0]}){has}. If the prefixes differ, wrap the same module as when the "
                "folder was saved, or rename the keys in the file. If the suffixes differ, use the "
                "target_modules and modules_to_save of the folder's configuration"
            )


def _agreed(ranks: Ranks, call: str, model: nn.Module, path: str, adapter: str | None) -> _Adapter:
    """Return the adapter on which all ranks agree. Collective.

    Raises:
        ValueError: as for `save`, on every rank.
        LoadError: ranks pass different folders or adapters.
    """
    chosen: list[_Adapter] = []

    def check() -> None:
        inner = _peft_model(model)
        name = _named(inner, adapter)
        tensors = find_tensors(inner, with_packed=True)
        own_tensors = (tensor for tensor in tensors if name in tensor.name.split("."))
        if scales := other_scales(own_tensors):
            raise ValueError(
                f"{scales[0]} ({count(len(scales), 'tensor')}), but a PEFT folder stores only the "
                f"configured scale. Call set_scale({name!r}, 1) of its layers, or create the "
                "adapter with the scale to save"
            )
        chosen.append(_chosen(inner, name))

    compare_arguments(ranks, call, {"folder": path, "adapter": adapter}, anyrank.LoadError, check)
    return chosen[0]


def _chosen(model: PeftModel, name: str, *, with_embeddings: bool = False) -> _Adapter:
    """Return an adapter with the tensors that PEFT saves for it."""
    state = model.state_dict()
    keys = _keys_in_folder(model, state, name, with_embeddings)
    return _Adapter(model, name, {key: state[keys[key]].detach() for key in keys})


def _is_resized(model: PeftModel, config: PeftConfig) -> bool:
    """Return whether a model has a different vocabulary than its base, according to the base's
    configuration on this machine: its folder, or the cache of Hugging Face.
    """
    current: Any = getattr(model, "config", None)
    size, base = getattr(current, "vocab_size", None), config.base_model_name_or_path
    if not size or not base:
        return False
    try:
        known: Any = type(current).from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return False  # it is not on this machine
    return known.vocab_size != size


def _keys_in_folder(
    model: PeftModel, tensors: dict[str, Any], adapter: str, with_embeddings: bool
) -> dict[str, str]:
    """Map keys in a PEFT folder to names in the model, for the tensors that PEFT saves.

    PEFT selects them among tensors without values, so that it gathers none.

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
        model, state_dict=outline, adapter_name=adapter, save_embedding_layers=with_embeddings
    )
    computed = sorted(key for key, tensor in chosen.items() if id(tensor) not in names)
    if computed:
        raise _computed_error(config, adapter, computed[0])
    return {key: names[id(chosen[key])] for key in sorted(chosen)}


def _computed_error(config: PeftConfig, adapter: str, key: str) -> ValueError:
    """Return the error for an adapter for which PEFT saves a computed value."""
    return ValueError(
        f"adapter {adapter!r} is of type {config.peft_type}. For it PEFT saves {key}, which is not "
        "a tensor of the model. Save it with PEFT (save_pretrained), from an unsharded model; "
        "anyrank.load reads the file into a model with such an adapter"
    )


def _read(folder: str) -> tuple[str, dict[str, Any], set[str]]:
    """Return the source to load from a PEFT folder, its configuration, and the keys of its tensors.

    Raises:
        LoadError: the folder contains no adapter, or it cannot be read.
    """
    try:
        config = PeftConfig.from_pretrained(folder).to_dict()
        try:
            source, listing = folder, anyrank.inspect(folder)
        except anyrank.LoadError:
            # Weights next to the adapter's own file, such as a whole model, are not ambiguous
            # here.
            paths = [os.path.join(folder, name) for name in (WEIGHTS, PICKLE)]
            source = next((path for path in paths if os.path.exists(path)), folder)
            listing = anyrank.inspect(source)
        return source, config, {tensor.name for tensor in listing.tensors}
    except (OSError, ValueError, anyrank.LoadError) as error:
        raise anyrank.LoadError(
            f"{folder}: cannot read an adapter, for which adapter_config.json and {WEIGHTS} or "
            f"{PICKLE} are needed: {error}"
        ) from error


def _write(folder: str, weights: dict[str, torch.Tensor], config: PeftConfig) -> None:
    """Write the files of an adapter; each is replaced once it is complete, the configuration last.

    Raises:
        CheckpointError: they cannot be written.
    """
    path = os.path.join(folder, WEIGHTS)
    was, config.inference_mode = config.inference_mode, True  # as PEFT writes it
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
