"""The inputs of a function besides its arguments: random state and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from anyrank.training.random_state.generators import Source, ambient, is_in_use


class Ambient:
    """The random generators and the autocast settings of a call.

    Python's and numpy's global generators are included only if the user names them: reading and
    writing them costs more than everything else that a tile adds.

    Args:
        devices: devices of the call's tensors; the CPU and the current accelerator are added.
        generators: other generators that the function uses.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Source]) -> None:
        used = set(devices) | _current_accelerator()
        global_sources = ambient(sorted(filter(is_in_use, used), key=str))
        torch_sources = [s for s in global_sources if s.name in ("torch", "device")]
        self.sources: list[Source] = [*torch_sources, *generators]
        # Torch's checkpoint restores these settings for two types, and the default device.
        types = {device.type for device in used} - {"cpu", DefaultDeviceType.get_device_type()}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(types)
            if torch.amp.is_autocast_available(kind)
        ]

    def random(self) -> list[Any]:
        """Return the current state of each generator."""
        return [source.get() for source in self.sources]

    def put(self, random: list[Any]) -> None:
        """Set the generators to states that `random` returned."""
        for source, state in zip(self.sources, random, strict=True):
            source.put(state)

    def autocast(self) -> contextlib.ExitStack:
        """Return a context with the settings of the call."""
        stack = contextlib.ExitStack()
        for kind, enabled, dtype in self._autocast:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


def in_transform() -> bool:
    """Return True if torch.func (vmap, grad, jvp), forward-mode AD or a trace is active.

    They do not support saved-tensor hooks, so under them a region is a plain call. Torch has no
    public name for the first two.
    """
    torch_c: Any = getattr(torch, "_C", None)
    is_transforming = getattr(torch_c, "_are_functorch_transforms_active", None)
    level: int = getattr(torch.autograd.forward_ad, "_current_level", -1)
    traces: Any = torch.jit
    return level >= 0 or traces.is_tracing() or (is_transforming is not None and is_transforming())


def _current_accelerator() -> set[torch.device]:
    """Return the accelerator's current device if it is in use. Must not initialize it."""
    if not torch.accelerator.is_available():
        return set()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not is_in_use(kind):
        return set()
    return {torch.device(kind.type, torch.accelerator.current_device_index())}
