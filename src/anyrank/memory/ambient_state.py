"""What a function depends on besides its arguments: random state, autocast, default device."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.memory.uncompiled import uncompiled

State = Any  # what `read` of a stream returns and its `write` takes


@dataclass(frozen=True)
class RandomState:
    """The state of one random number generator, and how to read and set it."""

    read: Callable[[], State]
    write: Callable[[State], object]
    state: State


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

    random: tuple[RandomState, ...]
    autocast: tuple[Autocast, ...]
    device: torch.device

    @classmethod
    @uncompiled
    def now(
        cls, devices: Iterable[torch.device], generators: Sequence[torch.Generator]
    ) -> AmbientState:
        """The state of this thread, for the CPU, the current accelerator and the given devices."""
        known = set(devices) | current_accelerator()
        types = {device.type for device in known} | {"cpu"}
        return cls(
            random=tuple(random_states(known, generators)),
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
        before = [stream.read() for stream in self.random]
        try:
            for stream in self.random:
                stream.write(stream.state)
            with contextlib.ExitStack() as stack:
                self.enter(stack)
                yield
        finally:
            for stream, state in zip(self.random, before, strict=True):
                stream.write(state)

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
    if kind is None or not is_initialized(kind.type):
        return set()
    return {torch.device(kind.type, torch.accelerator.current_device_index())}


def is_initialized(device_type: str) -> bool:
    module: Any = torch.get_device_module(device_type)
    check: Any = getattr(module, "is_initialized", None)
    return check is None or bool(check())


def python_state() -> tuple[int, array[int], float | None]:
    """The state of `random` in 2.5 KB: the tuple of integers that it returns takes 20."""
    version, state, gauss = random.getstate()
    return version, array("I", state), gauss


def set_python_state(state: tuple[int, array[int], float | None]) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def random_states(
    devices: Iterable[torch.device], generators: Sequence[torch.Generator]
) -> Generator[RandomState]:
    yield RandomState(torch.get_rng_state, torch.set_rng_state, torch.get_rng_state())
    yield RandomState(python_state, set_python_state, python_state())
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"].random
        read = functools.partial(numpy.get_state, legacy=False)
        yield RandomState(read, numpy.set_state, read())
    for device in sorted(devices, key=str):
        if device.type in ("cpu", "meta"):
            continue
        module: Any = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            yield RandomState(
                lambda m=module, d=device: m.get_rng_state(d),
                lambda state, m=module, d=device: m.set_rng_state(state, d),
                module.get_rng_state(device),
            )
    for generator in {id(each): each for each in generators}.values():
        yield RandomState(generator.get_state, generator.set_state, generator.get_state())
