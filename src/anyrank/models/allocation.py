"""Memory for a rank's share of tensors: on which device, and how much for staging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.tensors import ModelTensor
from anyrank.settings import BUFFER_BYTES, CUDA_BUFFER_BYTES
from anyrank.tensors.torch_classes import is_fsdp2
from anyrank.world.device import rank_device


def device_for(target: ModelTensor, default: torch.device) -> torch.device:
    """Return the device of a real tensor, or the future device of a meta tensor.

    Raises:
        LoadError: the tensor's FSDP2 unit computes on a different device than this rank's.
    """
    if not target.is_meta:
        return (target.local() if target.is_dtensor else target.tensor).device
    if not target.is_dtensor:
        return default
    mesh: Any = target.tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    groups = [group for entry in target.registrations for group in _groups(entry.path)]
    policies = [type(getattr(group, "offload_policy", None)).__name__ for group in groups]
    if mesh.device_type == "cpu" or "CPUOffloadPolicy" in policies:
        return torch.device("cpu")
    own_device = rank_device()
    for device in {getattr(group, "device", own_device) for group in groups} - {own_device}:
        raise LoadError(
            f"{target.name}: fully_shard was called while {device} was the current device, but "
            f"this rank's device is {own_device}. Call torch.accelerator.set_device_index"
            f"({own_device.index}) before fully_shard."
        )
    return own_device


def default_device(targets: list[ModelTensor]) -> torch.device:
    """Return the device for plain meta tensors: the real parameters' device, else the rank's."""
    real = (t for t in targets if t.kind == "parameter" and not t.is_meta and t.local_numel)
    first = next(real, None)
    return rank_device() if first is None else first.local().device


def default_buffer(targets: list[ModelTensor]) -> int:
    """Return the size of the staging memory for these targets, from the settings."""
    default = default_device(targets)
    return buffer_for(device_for(target, default) for target in targets)


def buffer_for(devices: Iterable[torch.device]) -> int:
    """Return the size of the staging memory, from the settings; more if a device is filled."""
    on_cpu = all(device.type == "cpu" for device in devices)
    return (BUFFER_BYTES if on_cpu else CUDA_BUFFER_BYTES).get()


def _groups(path: tuple[nn.Module, ...]) -> list[Any]:
    """Return the parameter groups of the FSDP2 unit that owns a module.

    FSDP2 has no public names for its policy and its device. If the private ones are missing, the
    unit's real parameters show them, and a model that is all on meta goes to the device.
    """
    unit: Any = next((m for m in reversed(path) if is_fsdp2(m)), None)
    state: Any = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return [group for group in groups if group is not None]


def room_for(target: ModelTensor, device: torch.device) -> torch.Tensor:
    """Return memory for this rank's share of a target: its own, or new memory if it is on meta."""
    return allocate(target, device_for(target, device)) if target.is_meta else target.local()


def allocate(target: ModelTensor, device: torch.device) -> torch.Tensor:
    """Allocate uninitialized memory of this rank's share; every element must then be written.

    A plain tensor keeps the strides that it has on meta, for example channels_last.
    """
    if target.layout is None and not target.tensor.is_contiguous():
        return torch.empty_like(target.tensor.detach(), device=device)
    return torch.empty(target.local_shape, dtype=target.dtype, device=device)
