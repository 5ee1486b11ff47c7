"""A rank's share of a model while it is filled: its memory, and how it gets into the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.frozen.freeze import remember
from anyrank.models.first_values.initialize import Init, Initializer
from anyrank.models.frozen_parts import frozen_info
from anyrank.models.memory_meter import Meter
from anyrank.models.replace import Replacement, replace
from anyrank.models.tensors import ModelTensor
from anyrank.settings import BUFFER_BYTES, CUDA_BUFFER_BYTES
from anyrank.tensors.torch_classes import is_fsdp2
from anyrank.world.device import rank_device


class ModelShare:
    """The part of a model that one rank fills. Its methods do not communicate.

    Args:
        model, match, meter: the model, match and meter of the call.
        seed: the first rank's torch seed.
        init: as for `Initializer`.
        device: the device for plain meta tensors. Default: the device of the model's real
            parameters, else the rank's device.

    Attributes:
        allocated: new memory for meta tensors, and for tensors that keep their values until the
            end.
        rules: initialized tensor -> its rule.
    """

    def __init__(
        self,
        model: nn.Module,
        match: ModelMatch,
        meter: Meter,
        seed: int,
        *,
        init: Init | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.match = match
        self.meter = meter
        self.device = default_device(match.tensors) if device is None else device
        meter.watch({self.device, *(target.tensor.device for target in match.tensors)})
        self.model, self.seed, self.init = model, seed, init
        self.allocated: dict[int, torch.Tensor] = {}
        self._real: dict[int, torch.Tensor] = {}  # cached, because to_local of a DTensor takes 5 us
        self.rules: dict[str, str] = {}
        self.has_moved = False  # whether plain tensors have moved from meta to the device

    def allocate(self, copied: Collection[int] = ()) -> None:
        """Allocate memory for the meta tensors to fill, and for the real tensors in `copied`.

        The real tensors keep their values until `commit`.
        """
        for index in (*self.match.stored, *self.match.initialize):
            target = self.match.tensors[index]
            if index in copied or target.is_meta:
                self.allocated[index] = self.memory_for(index)
            self.has_moved |= index in self.match.stored and target.is_meta and not target.layout

    def memory_for(self, index: int) -> torch.Tensor:
        """Allocate uninitialized memory for a tensor's share, on the tensor's future device."""
        target = self.match.tensors[index]
        return allocate(target, device_for(target, self.device))

    def local(self, index: int) -> torch.Tensor:
        """Return the memory to fill: the tensor's own, if it is real and no other was allocated."""
        memory = self.allocated.get(index)
        memory = self._real.get(index) if memory is None else memory
        if memory is None:
            memory = self._real[index] = self.match.tensors[index].local()
        return memory

    def real(self) -> dict[int, torch.Tensor]:
        """Return the memory of real tensors that the source fills, by position. Call it first."""
        tensors = self.match.tensors
        return {i: self.local(i) for i in self.match.stored if not tensors[i].is_meta}

    def initialize(self) -> None:
        """Fill the tensors that need a rule.

        Raises:
            LoadError: some tensors have no rule; the error names each of them.
        """
        if self.match.initialize:
            wanted = [(self.match.tensors[i], self.local(i)) for i in self.match.initialize]
            self.rules |= self.initializer.fill_all(wanted, self.meter.sample)

    @cached_property
    def initializer(self) -> Initializer:
        """The initializer, which most loads do not need."""
        return Initializer(self.model, self.seed, self.init)

    def filled(self) -> list[ModelTensor]:
        """The tensors that the source fills."""
        return [self.match.tensors[index] for index in self.match.stored]

    def commit(self, replacements: Iterable[Replacement] = ()) -> list[str]:
        """Put the new values into the model: replace all meta tensors, or none.

        Args:
            replacements: replacements of additional tensors.

        Returns:
            Names of the tensors that are new objects.
        """
        tensors = self.match.tensors
        new = [Replacement(tensors[i], t) for i, t in self.allocated.items() if tensors[i].is_meta]
        for index, values in self.allocated.items():
            if not tensors[index].is_meta:
                self._real[index].copy_(values)
        renewed = replace([*replacements, *new])
        # Only now, because it hashes the values in the model.
        self._remember_frozen()
        self.move_buffers()
        return renewed

    def _remember_frozen(self) -> None:
        """Record the values of the frozen parts that were filled."""
        paths = [entry.path for target in self.filled() for entry in target.registrations]
        parts = [part for part in {m: None for path in paths for m in path} if frozen_info(part)]
        if parts:
            for part in parts:
                remember(part)

    def move_buffers(self) -> None:
        """Move real CPU buffers of a plain model to the device of its new parameters."""
        if not self.has_moved or self.device.type == "cpu":
            return
        for target in self.match.tensors:
            if target.kind != "parameter" and target.tensor.device.type == "cpu":
                target.tensor = target.tensor.to(self.device)
                for entry in target.registrations:
                    setattr(entry.module, entry.attribute, target.tensor)


# -- devices of the memory, and staging memory ----------------------------------------------


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
