"""What a function depends on besides its arguments: random state and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from anyrank.random_state.streams import Source, ambient, is_in_use


class Ambient:
    """The random generators and the autocast settings of a call.

    Python's and numpy's global generators are not among them: reading and writing these takes
    longer than a tile's other overhead, so they are kept only where the user names them.

    Args:
        devices: those of the call's tensors; the CPU and the current accelerator are added.
        generators: the function's own.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Source]) -> None:
        known = set(devices) | _current_accelerator()
        streams = ambient(sorted(filter(is_in_use, known), key=str))
        torchs = [each for each in streams if each.name in ("torch", "device")]
        self.sources: list[Source] = [*torchs, *generators]
        # Torch's checkpoint restores these settings for two types, and the default device.
        others = {device.type for device in known} - {"cpu", DefaultDeviceType.get_device_type()}
        self._autocast = [
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in sorted(others)
            if torch.amp.is_autocast_available(each)
        ]

    def random(self) -> list[Any]:
        """The state of each generator now."""
        return [source.get() for source in self.sources]

    def put(self, random: list[Any]) -> None:
        """Let the generators go on from states that `random` returned."""
        for source, state in zip(self.sources, random, strict=True):
            source.put(state)

    def autocast(self) -> contextlib.ExitStack:
        """A context with the settings of the call."""
        stack = contextlib.ExitStack()
        for kind, enabled, dtype in self._autocast:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


def in_transform() -> bool:
    """Whether torch.func (vmap, grad, jvp), forward-mode differentiation or a trace is at work.

    They see through no saved tensors, so there is nothing to record: calls are plain calls. Torch
    has no public name for the first two.
    """
    native: Any = getattr(torch, "_C", None)
    of_func = getattr(native, "_are_functorch_transforms_active", None)
    level: int = getattr(torch.autograd.forward_ad, "_current_level", -1)
    traces: Any = torch.jit
    return level >= 0 or traces.is_tracing() or (of_func is not None and of_func())


def _current_accelerator() -> set[torch.device]:
    """The accelerator's current device if it is in use: asking must not initialize it."""
    if not torch.accelerator.is_available():
        return set()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not is_in_use(kind):
        return set()
    return {torch.device(kind.type, torch.accelerator.current_device_index())}
