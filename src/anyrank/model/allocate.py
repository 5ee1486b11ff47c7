"""Memory for tensors that are still on meta: where it belongs, and how much is staged for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from anyrank.errors import LoadError
from anyrank.model.tensors import ModelTensor
from anyrank.settings import BUFFER_BYTES, CUDA_BUFFER_BYTES
from anyrank.world.device import rank_device


def device_for(target: ModelTensor, default: torch.device) -> torch.device:
    """The device of a real tensor, or the device where a meta tensor is to be.

    Raises:
        LoadError: the tensor's FSDP2 unit computes on another device than this rank's.
    """
    if not target.is_meta:
        return (target.local() if target.is_dtensor else target.tensor).device
    if not target.is_dtensor:
        return default
    mesh: Any = target.tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    groups = [group for place in target.registrations for group in _groups(place.path)]
    policies = [type(getattr(group, "offload_policy", None)).__name__ for group in groups]
    if mesh.device_type == "cpu" or "CPUOffloadPolicy" in policies:
        return torch.device("cpu")
    own = rank_device()
    for device in {getattr(group, "device", own) for group in groups} - {own}:
        raise LoadError(
            f"{target.name}: its FSDP2 unit computes on {device}, which was the current device in "
            f"fully_shard, and this rank's is {own}: call torch.accelerator.set_device_index"
            f"({own.index}) before fully_shard"
        )
    return own


def default_device(targets: list[ModelTensor]) -> torch.device:
    """Where plain meta tensors go: to the model's real parameters, else to the rank's device."""
    real = (t for t in targets if t.kind == "parameter" and not t.is_meta and t.local_numel)
    first = next(real, None)
    return rank_device() if first is None else first.local().device


def default_buffer(targets: list[ModelTensor]) -> int:
    """Bytes of staging memory to fill targets with, from the settings."""
    default = default_device(targets)
    return buffer_for(device_for(target, default) for target in targets)


def buffer_for(devices: Iterable[torch.device]) -> int:
    """Bytes of staging memory, from the settings: more, and pinned, where a device is filled."""
    on_cpu = all(device.type == "cpu" for device in devices)
    return (BUFFER_BYTES if on_cpu else CUDA_BUFFER_BYTES).get()


def _groups(path: tuple[nn.Module, ...]) -> list[Any]:
    """What the FSDP2 unit that owns a module says of its parameters.

    FSDP2 has no public name for its policy and its device; where the private ones are missing, the
    unit's real parameters would show them, and a meta model without them goes to the device.
    """
    unit: Any = next((m for m in reversed(path) if isinstance(m, FSDPModule)), None)
    state: Any = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return [group for group in groups if group is not None]


def allocate(target: ModelTensor, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of this rank's share of a target; every element must be written.

    A plain tensor has its strides on meta already, as of channels_last.
    """
    if target.layout is None and not target.tensor.is_contiguous():
        return torch.empty_like(target.tensor.detach(), device=device)
    return torch.empty(target.local_shape, dtype=target.dtype, device=device)
