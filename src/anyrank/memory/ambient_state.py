"""What a function depends on besides its arguments: random state, autocast, default device."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.memory.uncompiled import uncompiled
from anyrank.random_state.streams import Source, ambient, is_in_use


@dataclass(frozen=True)
class Autocast:
    """The autocast settings of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True)
class AmbientState:
    """Recorded where a function runs, and restored where it runs again, maybe in another thread."""

    random: tuple[tuple[Source, Any], ...]  # with the state of each
    autocast: tuple[Autocast, ...]
    device: torch.device

    @classmethod
    @uncompiled
    def now(cls, devices: Iterable[torch.device], generators: Iterable[Source]) -> AmbientState:
        """The state of this thread, for the CPU, the current accelerator and the given devices, and
        that of the function's own generators.
        """
        known = set(devices) | current_accelerator()
        types = {device.type for device in known} | {"cpu"}
        streams = ambient(sorted(filter(is_in_use, known), key=str))
        return cls(
            random=tuple((stream, stream.get()) for stream in (*streams, *generators)),
            autocast=tuple(
                Autocast(
                    each,
                    torch.is_autocast_enabled(each),
                    torch.get_autocast_dtype(each),
                    torch.is_autocast_cache_enabled(),
                )
                for each in sorted(types)
                if torch.amp.is_autocast_available(each)
            ),
            device=torch.get_default_device(),
        )

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Apply the recorded state inside, and restore the state from before afterwards."""
        before = [stream.get() for stream, _ in self.random]
        try:
            for stream, state in self.random:
                stream.put(state)
            with contextlib.ExitStack() as stack:
                self.enter(stack)
                yield
        finally:
            for (stream, _), state in zip(self.random, before, strict=True):
                stream.put(state)

    def enter(self, stack: contextlib.ExitStack) -> None:
        """Enter autocast and the default device where they differ from the current ones."""
        for each in self.autocast:
            if each.enabled or torch.is_autocast_enabled(each.device_type):
                stack.enter_context(
                    torch.autocast(
                        each.device_type,
                        dtype=each.dtype,
                        enabled=each.enabled,
                        cache_enabled=each.cache,
                    )
                )
        if torch.get_default_device() != self.device:
            stack.enter_context(self.device)


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


def current_accelerator() -> set[torch.device]:
    """The accelerator's current device if it is in use: asking must not initialize it."""
    if not torch.accelerator.is_available():
        return set()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not is_in_use(kind):
        return set()
    return {torch.device(kind.type, torch.accelerator.current_device_index())}
