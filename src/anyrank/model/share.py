"""A rank's share of a model while it is filled: memory that is allocated, and not in place yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.frozen.freeze import remember
from anyrank.model.allocate import allocate, default_device, device_for
from anyrank.model.initialise import Init, Initialiser
from anyrank.model.match import ModelMatch
from anyrank.model.memory_meter import Meter
from anyrank.model.replace import Replacement, replace
from anyrank.model.tensors import ModelTensor
from anyrank.wording import first_few


class ModelShare:
    """What one rank fills, by this rank alone: no method waits for others.

    Args:
        model, match, meter: of the call.
        seed: the first rank's torch seed.
        init: as for `Initialiser`.
        device: where plain tensors on meta go. Default: to the model's real parameters, else to the
            rank's own device.

    Attributes:
        allocated: memory of tensors on meta, and of those that keep their values until the end.
        rules: tensors that were initialised -> the rule.
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
        self.initialiser = Initialiser(model, seed, init)
        self.allocated: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}  # of real tensors: a DTensor's takes 5 us to find
        self.rules: dict[str, str] = {}
        self.has_moved = False  # plain tensors from meta to the device

    def allocate(self, apart: Collection[int] = ()) -> None:
        """Memory for what is filled and on meta, and for the real tensors of `apart`, which keep
        their values until `commit`.
        """
        for index in (*self.match.stored, *self.match.initialise):
            target = self.match.tensors[index]
            if index in apart or target.is_meta:
                self.allocated[index] = self.memory_for(index)
            self.has_moved |= index in self.match.stored and target.is_meta and not target.layout

    def memory_for(self, index: int) -> torch.Tensor:
        """Uninitialised memory of a tensor's share, where the tensor is to be."""
        target = self.match.tensors[index]
        return allocate(target, device_for(target, self.device))

    def local(self, index: int) -> torch.Tensor:
        """The memory to fill: the tensor's own, if it is real and nothing else was allocated."""
        found = self.allocated.get(index)
        found = self._own.get(index) if found is None else found
        if found is None:
            found = self._own[index] = self.match.tensors[index].local()
        return found

    def real(self) -> dict[int, torch.Tensor]:
        """The memory of the real tensors that the source fills, by position; before `allocate`."""
        tensors = self.match.tensors
        return {i: self.local(i) for i in self.match.stored if not tensors[i].is_meta}

    def initialise(self) -> None:
        """Fill what a rule fills.

        Raises:
            LoadError: no rule does; names each of them.
        """
        without: list[str] = []
        for index in self.match.initialise:
            target = self.match.tensors[index]
            rule = self.initialiser.fill(target, self.local(index))
            if rule is None:
                without.append(target.name)
            else:
                self.rules[target.name] = rule
            self.meter.sample()
        if without:
            raise LoadError(
                f"no rule gives initial values to {', '.join(first_few(without, 10))} (looked for "
                "_init_weights, reset_parameters, init_weights): load their values, give their "
                "modules a reset_parameters(), or call materialize(init=) with a rule of your own"
            )

    def filled(self) -> list[ModelTensor]:
        """The tensors that the source fills."""
        return [self.match.tensors[index] for index in self.match.stored]

    def commit(self, replacements: Iterable[Replacement] = ()) -> list[str]:
        """Give the model what was filled: everything, or nothing of what is on meta.

        Args:
            replacements: of further tensors.

        Returns:
            Names of the tensors that are new objects.
        """
        tensors = self.match.tensors
        new = [Replacement(tensors[i], t) for i, t in self.allocated.items() if tensors[i].is_meta]
        for index, values in self.allocated.items():
            if not tensors[index].is_meta:
                self._own[index].copy_(values)
        renewed = replace([*replacements, *new])
        self._remember_frozen()
        self.move_buffers()
        return renewed

    def _remember_frozen(self) -> None:
        """Record what the frozen parts hold that were filled."""
        paths = [place.path for target in self.filled() for place in target.registrations]
        for part in {module: None for path in paths for module in path}:
            if "anyrank_frozen" in part.__dict__:
                remember(part)

    def move_buffers(self) -> None:
        """Move real CPU buffers of a plain model to the device that its parameters got."""
        if not self.has_moved or self.device.type == "cpu":
            return
        for target in self.match.tensors:
            if target.kind != "parameter" and target.tensor.device.type == "cpu":
                moved = target.tensor.to(self.device)
                for place in target.registrations:
                    setattr(place.module, place.attribute, moved)
