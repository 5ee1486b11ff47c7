"""`anyrank.cpu_only`: tensors stay on the CPU, whatever device a third-party loader asks for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.serialization import register_package

CPU = torch.device("cpu")
HOME = ("cpu", "meta")  # device types that pass as they are
# Torch runs restorers in this order and 10 is its own first. Equal numbers make it compare the
# functions, which fails: so a number that nobody else is likely to use.
PRIORITY = -7919
MOVES = ("cuda", "xpu", "hpu", "mtia", "ipu")  # Tensor methods that name an accelerator
INDEX_POSITION = {"to": 1, "_parse_to": 0}  # functions that take a device index by position


@contextmanager
def cpu_only() -> Generator[None]:
    """Keep what any third-party loader makes on the CPU.

    Inside, a device that is not the CPU (or meta) becomes the CPU wherever it is named: to torch's
    functions and methods, to `torch.load` by its argument or by the file, to safetensors, and so to
    what is built on them. Nothing is asked of the loader. Move the result to the rank's device
    afterwards, or wrap it, or leave that to `load`.

    Example::

        torch.save({"weight": torch.ones(2)}, "vae.pt")
        with anyrank.cpu_only():
            state = torch.load("vae.pt", map_location="cuda")  # or deep inside a loader
            made = torch.zeros(2, device="cuda:0")
        assert state["weight"].is_cpu and made.is_cpu

    Holds for the thread that enters, nests, and ends with the block, also by an exception; the
    current device of an accelerator that is in use is then the one from before. Each rank enters by
    itself. What is on an accelerator already stays there. A `torch.device` made inside is the CPU
    for good. Threads that a loader starts, calls that have no form for the CPU (`torch.cuda.init`)
    and TorchScript files, which name their device in C++, are not redirected: give the rank its
    device first (`torch.accelerator.set_device_index(LOCAL_RANK)`), so that what passes at least
    lands there.
    """
    _register_restorer()
    backend, current = _current_device()
    THREAD.depth += 1
    try:
        with torch.device(CPU), _Redirect():
            yield
    finally:
        THREAD.depth -= 1
        if current is not None:
            backend.set_device(current)


def _current_device() -> tuple[Any, int | None]:
    """The module of the machine's accelerator, and its current device if it is in use."""
    accelerator = torch.accelerator.current_accelerator()
    backend: Any = None if accelerator is None else torch.get_device_module(accelerator)
    is_used = hasattr(backend, "is_initialized") and backend.is_initialized()
    return backend, backend.current_device() if is_used else None


class _Redirect(TorchFunctionMode):
    """Rewrites accelerators to the CPU in every torch call of the thread that holds it."""

    def __init__(self) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator()
        self.moves = (*MOVES, accelerator.type) if accelerator is not None else MOVES

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return _redirect_device(args, kwargs)
        if name == "pin_memory":  # pinned pages belong to an accelerator's context
            return args[0]
        if name in self.moves and func is getattr(torch.Tensor, name, None):
            return torch.Tensor.to(args[0], CPU)
        position = INDEX_POSITION.get(name, -1)
        args = tuple(_on_cpu(value, index == position) for index, value in enumerate(args))
        kwargs = {key: _on_cpu(value, key == "device") for key, value in kwargs.items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _redirect_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """`torch.device(...)` as it is inside: a bare index means an accelerator too."""
    if any(type(value) is int for value in args[:1]):
        return CPU
    return _on_cpu(torch.device(*args, **kwargs), False)


def _on_cpu(value: Any, may_be_index: bool) -> Any:
    """The CPU in place of an argument that names an accelerator; any other value as it is."""
    if isinstance(value, torch.device):
        return value if value.type in HOME else CPU
    if isinstance(value, str):
        return value.replace("torch.cuda.", "torch.") if _is_home(value) else "cpu"
    if isinstance(value, type) and value.__module__ == "torch.cuda":
        return f"torch.{value.__name__}"  # torch.cuda.FloatTensor and its like
    return "cpu" if may_be_index and type(value) is int else value


def _is_home(text: str) -> bool:
    """Whether a text names no accelerator: the CPU, meta, or no device at all."""
    try:
        return torch.device(text).type in HOME
    except RuntimeError:
        return True


# -- torch.load -----------------------------------------------------------------------------------


class _Thread(threading.local):
    """How many blocks the thread is in."""

    depth = 0


THREAD = _Thread()


@functools.cache
def _register_restorer() -> None:
    """Add our restorer to torch's, once a process: torch has no way to take it out again."""
    register_package(PRIORITY, lambda storage: None, _restore_on_cpu)


def _restore_on_cpu(storage: Any, location: str) -> Any:
    """The storage as read, on the CPU, for a location that is an accelerator; outside, nothing."""
    return storage if THREAD.depth and location.split(":")[0] not in HOME else None
