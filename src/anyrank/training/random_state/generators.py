"""The random generators of a process: Python's, numpy's, torch's on the CPU and the rank's device.

Each can be read, restored and seeded. `seeded` puts all of them under a seed while a block runs; by
such seeds a microbatch gets random numbers that do not depend on the rank.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import random
import sys
from array import array
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from anyrank.errors import RankError
from anyrank.tensors.hashing import derive
from anyrank.world.device import rank_device

MT_WORDS = 624  # in the state of a Mersenne twister


class Source(Protocol):
    """A source of random numbers."""

    def get(self) -> Any:
        """Return its state, in its owner's own form."""
        ...

    def put(self, state: Any) -> None:
        """Continue from a state that `get` or `from_json` returned."""
        ...


class ProcessGenerator(Source, Protocol):
    """A source of random numbers that exists once per process.

    Attributes:
        name: its name in checkpoints and reports.
        algorithm: the algorithm whose state it has, including the kind of device.
    """

    name: str
    algorithm: str

    def seed(self, number: int) -> None:
        """Restart from a 64-bit number."""
        ...

    def to_json(self, state: Any) -> Any:
        """Return a state as JSON."""
        ...

    def from_json(self, value: Any) -> Any:
        """Read a state from the form of `to_json`; raise a built-in exception for anything else."""
        ...


def _as_text(data: Any) -> str:
    """Return bytes in base64: as numbers they would fill a manifest with lines."""
    return base64.b64encode(data).decode()


class PythonGenerator:
    """The global generator of the `random` module, or one that a user made."""

    name, algorithm = "python", "mt19937"

    def __init__(self, generator: Any = random) -> None:
        self.random = generator

    def get(self) -> Any:
        version, words, gauss = self.random.getstate()
        return version, array("I", words), gauss  # 2.5 KB, where a tuple of integers takes 20

    def put(self, state: Any) -> None:
        version, words, gauss = state
        self.random.setstate((version, tuple(words), gauss))

    def seed(self, number: int) -> None:
        self.random.seed(number)

    def to_json(self, state: Any) -> Any:
        version, words, gauss = state
        return [version, _as_text(words), gauss]

    def from_json(self, value: Any) -> Any:
        version, words, gauss = value
        state = (version, tuple(array("I", base64.b64decode(words))), gauss)
        random.Random().setstate(state)  # noqa: S311 - raises for anything that is not a state
        return state


class NumpyGenerator:
    """numpy's global generator, or a `RandomState`. For processes that have loaded numpy."""

    name, algorithm = "numpy", "mt19937"

    def __init__(self, generator: Any = None) -> None:
        self.random: Any = generator or sys.modules["numpy"].random

    def get(self) -> Any:
        return self.random.get_state(legacy=False)

    def put(self, state: Any) -> None:
        self.random.set_state(state)

    def seed(self, number: int) -> None:
        self.random.seed(number & 0xFFFFFFFF)  # 32 bits: an array takes five times as long

    def to_json(self, state: Any) -> Any:
        twister = state["state"]
        return [_as_text(twister["key"]), twister["pos"], state["has_gauss"], state["gauss"]]

    def from_json(self, value: Any) -> Any:
        words, position, has_gauss, gauss = value
        if not 0 <= position <= MT_WORDS:
            raise ValueError("not a state of mt19937")  # numpy would read beyond the state
        state = ("MT19937", array("I", base64.b64decode(words)), position, has_gauss, gauss)
        sys.modules["numpy"].random.RandomState().set_state(state)  # raises if it is not a state
        return state


class _GlobalNumpy(NumpyGenerator):
    """numpy's global generator, whose state is copied as memory: `get_state` and `set_state` copy
    each word as an object, and take 80 us.
    """

    def _memory(self) -> Any:
        get_bits = getattr(self.random, "get_bit_generator", None)
        return None if get_bits is None else _memory_of(get_bits())

    def get(self) -> Any:
        """Return its state: bytes, or what `get_state` returns."""
        memory = self._memory()
        if memory is None:
            return super().get()
        state = memory.raw
        # A pair of normal numbers is drawn at a time, and the second one is kept outside of it.
        normal = self.random.standard_normal()
        if memory.raw == state:  # this was a second one
            whole = super().get() | {"has_gauss": 1, "gauss": normal}
            super().put(whole)
            return whole
        self.random.standard_normal()
        memory.raw = state
        return state

    def put(self, state: Any) -> None:
        if not isinstance(state, bytes):
            super().put(state)
            return
        self.seed(0)  # drops a normal number that is kept
        self._memory().raw = state

    def to_json(self, state: Any) -> Any:
        if not isinstance(state, bytes):
            return super().to_json(state)
        return [_as_text(state[: 4 * MT_WORDS]), _position_in(state), 0, 0.0]


@functools.lru_cache(maxsize=1)  # each microbatch needs it
def _global_numpy(module: Any) -> _GlobalNumpy:
    return _GlobalNumpy(module.random)


def _position_in(memory: bytes) -> int:
    return int.from_bytes(memory[4 * MT_WORDS :], sys.byteorder)


@functools.lru_cache(maxsize=1)
def _memory_of(bits: Any) -> Any:
    """Return the memory of a bit generator's state; None if it is not MT19937 as it is known: its
    words, and its position in them.
    """
    if type(bits).__name__ != "MT19937":
        return None
    memory = (ctypes.c_char * (4 * MT_WORDS + 4)).from_address(bits.ctypes.state_address)
    twister = bits.state["state"]
    is_known = memory.raw[: 4 * MT_WORDS] == twister["key"].tobytes()
    return memory if is_known and _position_in(memory.raw) == twister["pos"] else None


class _StateOfTorch:
    """The saved form of the state of a torch generator: its bytes, in base64."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        # States with different names are incompatible.
        self.algorithm = "mt19937" if device.type == "cpu" else f"{device.type} philox"

    def to_json(self, state: Any) -> Any:
        return _as_text(bytes(state.tolist()))

    def from_json(self, value: Any) -> Any:
        state = torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8)
        torch.Generator(self.device).set_state(state)  # raises if it is not a state
        return state


class TorchGenerator(_StateOfTorch):
    """A torch generator: the CPU's default one, or one that a user made."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        super().__init__(name, generator.device)
        self.generator = generator

    def get(self) -> Any:
        return self.generator.get_state()

    def put(self, state: Any) -> None:
        self.generator.set_state(state)

    def seed(self, number: int) -> None:
        self.generator.manual_seed(number)


class _DeviceGenerator(_StateOfTorch):
    """The default generator of an accelerator, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("device", device)
        self.module: Any = torch.get_device_module(device)
        # MPS has only one device, which takes no number
        self.where = () if device.type == "mps" else (device,)

    def get(self) -> Any:
        return self.module.get_rng_state(*self.where)

    def put(self, state: Any) -> None:
        self.module.set_rng_state(state, *self.where)

    def seed(self, number: int) -> None:
        self.put(torch.Generator(self.device).manual_seed(number).get_state())


# Made once, because each microbatch needs them twice.
_PYTHON, _TORCH = PythonGenerator(), TorchGenerator("torch", torch.default_generator)


def ambient(devices: Sequence[torch.device] = ()) -> list[ProcessGenerator]:
    """Return the process's global generators: Python's, numpy's if loaded, torch's on the CPU and
    `devices`.
    """
    generators: list[ProcessGenerator] = [_PYTHON]
    # `random` is an attribute of numpy once its import is complete.
    if hasattr(sys.modules.get("numpy"), "random"):
        generators.append(_global_numpy(sys.modules["numpy"]))
    generators.append(_TORCH)
    return generators + [_DeviceGenerator(device) for device in devices]


def own_accelerator() -> list[torch.device]:
    """Return the rank's own accelerator if the process already uses it, else nothing."""
    try:
        device = rank_device()
    except RankError:  # ranks that share devices do not own one
        return []
    return [device] if is_in_use(device) else []


def accelerators_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.device]:
    """Return the accelerators on which a model with these parameters computes, and the rank's."""
    devices = {parameter.device for parameter in parameters}
    return sorted({*filter(is_in_use, devices), *own_accelerator()}, key=str)


def is_in_use(device: torch.device) -> bool:
    """Return True if a device is an accelerator that this process has initialized.

    Initializes nothing.
    """
    if device.type in ("cpu", "meta"):
        return False
    check = getattr(torch.get_device_module(device), "is_initialized", None)
    return check is None or check()


@contextmanager
def seeded(number: int, devices: Sequence[torch.device] = ()) -> Generator[None, None, None]:
    """Run a block with generators that depend only on a 64-bit number, then restore the former."""
    with kept(devices):
        reseed(number, devices)
        yield


@contextmanager
def kept(devices: Sequence[torch.device] = ()) -> Generator[None, None, None]:
    """Run a block, then restore all generators to their former states."""
    before = [(generator, generator.get()) for generator in ambient(devices)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.put(state)


def reseed(number: int, devices: Sequence[torch.device] = ()) -> None:
    """Set all generators by a 64-bit number, which is itself random."""
    for generator in ambient(devices):
        # Not the same number for all: Python and numpy would draw the same numbers from it.
        generator.seed(number ^ _salt(generator.name))


@functools.cache
def _salt(name: str) -> int:
    """Return a number that makes the seed of one generator different from those of the others."""
    return derive(name)
