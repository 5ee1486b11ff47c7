"""PEFT adapters in sharded and wrapped models: exported and loaded as PEFT's own folders, merged.

Tested with peft 0.21. A run that leaves the frozen base out is `anyrank.TrainState(base=...)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.integrations.peft_names import keys_in_folder
from anyrank.integrations.versions import warn_if_untested

__all__ = ["load", "merge", "save"]

WEIGHTS = "adapter_model.safetensors"
# What a configuration may say otherwise without changing what the adapter computes.
FREE = (
    "base_model_name_or_path",
    "inference_mode",
    "revision",
    "peft_version",
    "task_type",
    "auto_mapping",
    "init_lora_weights",
    "lora_dropout",
    "modules_to_save",  # these and the next decide which tensors there are, and those are compared
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "runtime_config",
)

warn_if_untested("peft", "0.21", "0.21")


def save(model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None) -> None:
    """Write an adapter as a PEFT folder, from a model under FSDP2, DDP or none. All ranks.

    The folder is what `save_pretrained` writes of the adapter: `PeftModel.from_pretrained(base,
    folder)` reads it on any machine. Only the adapter's own tensors are gathered, one at a time,
    and the first rank writes them. Files that are there are replaced once the new ones are whole.

    Args:
        model: a PeftModel, or a wrapper of one.
        folder: made if it is not there.
        adapter: its name in the model; default: the active one.

    Raises:
        ValueError: no PeftModel; no such adapter; several are active, and none is named.
        CheckpointError: the first rank could not write; on all ranks.

    Example::

        import peft

        base = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
        anyrank.integrations.peft.save(model, "adapter")
        anyrank.integrations.peft.load(model, "adapter")
    """
    inner = _peft_model(model)
    adapter = _named(inner, adapter)
    own = inner.state_dict()
    weights: dict[str, torch.Tensor] = {}
    is_first = _rank() == 0
    for key, name in keys_in_folder(inner, own, adapter).items():
        tensor: Any = own[name].detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if is_first:  # a copy: several keys may share memory, which the format does not take
            weights[key] = whole.cpu().clone(memory_format=torch.contiguous_format)
    _on_first_rank(lambda: _write(os.fspath(folder), weights, inner.peft_config[adapter]))


def load(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None
) -> anyrank.LoadReport:
    """Fill an adapter from a PEFT folder, in a model under FSDP2, DDP or none. All ranks.

    The base stays as it is. Each rank reads its own share.

    Args:
        model: a PeftModel, or a wrapper of one, with an adapter of the same configuration.
        folder: as `save` and PEFT's `save_pretrained` write it.
        adapter: its name in the model; it has to be the active one, as it is by default.

    Returns:
        The report of `anyrank.load`.

    Raises:
        ValueError: no PeftModel, no such active adapter; a configuration that computes otherwise
            (r, lora_alpha, ...), before anything changes.
        LoadError: tensors that are missing, unexpected or of another shape.

    Example::

        import peft

        def adapted():
            base = torch.nn.Sequential(torch.nn.Linear(4, 4))
            return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))

        anyrank.integrations.peft.save(adapted(), "adapter")
        report = anyrank.integrations.peft.load(adapted(), "adapter")
        assert report.tensors == 2
    """
    inner = _peft_model(model)
    adapter, path = _named(inner, adapter), os.fspath(folder)
    if adapter not in inner.active_adapters:
        raise ValueError(f"{adapter!r} is not active: call model.set_adapter({adapter!r}) first")
    saved = PeftConfig.from_pretrained(path).to_dict()
    mine = inner.peft_config[adapter].to_dict()
    for name in sorted((mine.keys() | saved.keys()) - set(FREE)):
        if _plain(mine.get(name)) != _plain(saved.get(name)):
            raise ValueError(
                f"{path}: has {name}={saved.get(name)!r}, and the model's adapter "
                f"{mine.get(name)!r}: make the adapter with PeftConfig.from_pretrained(folder)"
            )
    file = os.path.join(path, WEIGHTS)
    with safe_open(file, framework="pt") as stored:
        missing = sorted(
            set(keys_in_folder(inner, inner.state_dict(), adapter)) - set(stored.keys())
        )
    if missing:
        raise anyrank.LoadError(
            f"{file}: lacks {len(missing)} tensors of the adapter, the first {missing[0]}: give "
            "the adapter the target_modules and modules_to_save of the folder's configuration"
        )
    return anyrank.load(model, file, missing="keep")


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
        ValueError: no PeftModel, no such adapter; merged already; a sharded adapter that is not
            plain LoRA; a sum that is not finite. Nothing has changed then.

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
        if isinstance(module, BaseTunerLayer) and adapter in _of(module)
    ]
    if any(layer.merged for layer in layers):
        raise ValueError(f"an adapter is merged already: call unmerge_adapter() before {adapter!r}")
    if not any(hasattr(parameter, "placements") for parameter in inner.parameters()):
        inner.merge_adapter(adapter_names=[adapter], safe_merge=True)
        return inner
    for layer in layers:
        variant = getattr(layer, "lora_variant", {})
        if not isinstance(layer, LoraLayer) or adapter in variant or layer.lora_bias[adapter]:
            raise ValueError(
                f"{type(layer).__name__}: only plain LoRA is merged while sharded: save() the "
                "adapter, and merge it into a whole model"
            )
    with torch.no_grad():
        finite = True
        for layer in layers:  # twice, as nothing may change before all are known to be finite
            finite &= bool(_sum(layer, adapter).isfinite().all())
        if not all(_gathered(finite)):
            raise ValueError(f"{adapter!r}: the merged weights have NaN or infinite values")
        for layer in layers:
            _local(layer.get_base_layer().weight).copy_(_sum(layer, adapter))
            layer.merged_adapters.append(adapter)
    return inner


def _sum(layer: Any, adapter: str) -> torch.Tensor:
    """This rank's part of a layer's merged weight."""
    weight = layer.get_base_layer().weight
    delta = layer.get_delta_weight(adapter)
    if hasattr(weight, "placements"):
        delta = delta.redistribute(weight.device_mesh, weight.placements)
    return _local(weight) + _local(delta).to(weight.dtype)


def _local(tensor: Any) -> torch.Tensor:
    """What this rank holds, to be written to in place."""
    plain = tensor.detach()
    return plain.to_local() if hasattr(plain, "placements") else plain


def _of(layer: Any) -> set[str]:
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
    """The adapter that is meant.

    Raises:
        ValueError: no such adapter; several are active, and none is named.
    """
    names: list[str] = model.active_adapters if adapter is None else [adapter]
    if len(names) != 1:
        raise ValueError(f"adapters {names} are active: name one with adapter=")
    if names[0] not in model.peft_config:
        raise ValueError(f"no adapter {names[0]!r}: the model has {sorted(model.peft_config)}")
    return names[0]


def _write(folder: str, weights: dict[str, torch.Tensor], config: PeftConfig) -> None:
    """Write the files of an adapter; each is replaced once it is whole, the configuration last."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, WEIGHTS)
    save_file(weights, f"{path}.part", metadata={"format": "pt"})
    with open(f"{path}.part", "rb+") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)
    was, config.inference_mode = config.inference_mode, True  # as PEFT writes it
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = was


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON has it; nothing and empty are alike."""
    if isinstance(value, set | frozenset):
        value = sorted(value)
    return value or None


# -- ranks ----------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _gathered(value: Any) -> list[Any]:
    """A value of every rank. All ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_first_rank(work: Callable[[], None]) -> None:
    """Work of the first rank, whose error is every rank's. All ranks.

    Raises:
        CheckpointError: the work failed.
    """
    error: Exception | None = None
    if _rank() == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    told = _gathered(None if error is None else f"{type(error).__name__}: {error}")[0]
    if told is not None:
        raise anyrank.CheckpointError(f"rank 0 could not write the adapter: {told}") from error
