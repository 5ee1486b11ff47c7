"""A rank's share of a model while it is filled: its memory, and how it gets into the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from anyrank.models.allocation import allocate, default_device, device_for
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.frozen.freeze import remember
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.frozen_parts import frozen_info
from anyrank.models.memory_meter import Meter
from anyrank.models.replace import Replacement, replace
from anyrank.models.tensors import ModelTensor


class ModelShare:
    """The part of a model that one rank fills. Its methods do not communicate.

    Args:
        match, meter: the match and meter of the call.
        initializer: the rules for tensors without bytes.
        device: the device for plain meta tensors. Default: the device of the model's real
            parameters, else the rank's device.

    Attributes:
        allocated: new memory for meta tensors, and for tensors that keep their values until the
            end.
        rules: initialized tensor -> its rule.
    """

    def __init__(
        self,
        match: ModelMatch,
        meter: Meter,
        initializer: Initializer,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.match = match
        self.meter = meter
        self.initializer = initializer
        self.device = default_device(match.tensors) if device is None else device
        meter.watch({self.device, *(target.tensor.device for target in match.tensors)})
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
