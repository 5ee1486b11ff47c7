"""`anyrank.cpu_only`: tensors stay on the CPU, whatever device a third-party loader requests."""

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
HOME = ("cpu", "meta")  # device types that pass unchanged
# torch runs restorers in this order; its own first one is 10. With equal numbers it would compare
# the functions, which fails, so this number is unlikely to be used by other code.
PRIORITY = -7919
MOVES = ("cuda", "xpu", "hpu", "mtia", "ipu")  # Tensor methods that name an accelerator
INDEX_POSITION = {"to": 1, "_parse_to": 0}  # functions that take a device index by position


@contextmanager
def cpu_only() -> Generator[None]:
    """Keep all tensors that a third-party loader creates on the CPU.

    Inside the block, a device other than the CPU (or meta) becomes the CPU wherever it is named: in
    torch's functions and methods, in `torch.load` by its argument or by the file, in safetensors,
    and so in everything that is built on them. The loader needs no changes. Afterwards move the
    result to the rank's device, or wrap it, or leave that to `load`.

    Example::

        torch.save({"weight": torch.ones(2)}, "vae.pt")
        with anyrank.cpu_only():
            state = torch.load("vae.pt", map_location="cuda")  # or deep inside a loader
            made = torch.zeros(2, device="cuda:0")
        assert state["weight"].is_cpu and made.is_cpu

    The context affects only the current thread, may be nested, and ends with the block, also after
    an exception; the current device of an accelerator in use is then restored. Does not
    communicate. Tensors on an accelerator stay on it. A `torch.device` created inside stays the CPU
    device. Threads that a loader starts, calls without a CPU form (`torch.cuda.init`) and
    TorchScript files, which name their device in C++, are not redirected. Set the rank's device
    first (`torch.accelerator.set_device_index(LOCAL_RANK)`), so that at least they use the right
    device.
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
    """Return the module of the machine's accelerator, and its current device if it is in use."""
    accelerator = torch.accelerator.current_accelerator()
    backend: Any = None if accelerator is None else torch.get_device_module(accelerator)
    is_used = hasattr(backend, "is_initialized") and backend.is_initialized()
    return backend, backend.current_device() if is_used else None


class _Redirect(TorchFunctionMode):
    """Replaces accelerators by the CPU in every torch call of the current thread."""

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
    """Return the device for `torch.device(...)` inside the block; an index means an accelerator."""
    if any(type(value) is int for value in args[:1]):
        return CPU
    return _on_cpu(torch.device(*args, **kwargs), False)


def _on_cpu(value: Any, may_be_index: bool) -> Any:
    """Return the CPU for an argument that names an accelerator; return other values unchanged."""
    if isinstance(value, torch.device):
        return value if value.type in HOME else CPU
    if isinstance(value, str):
        return value.replace("torch.cuda.", "torch.") if _is_home(value) else "cpu"
    if isinstance(value, type) and value.__module__ == "torch.cuda":
        return f"torch.{value.__name__}"  # such as torch.cuda.FloatTensor
    return "cpu" if may_be_index and type(value) is int else value


def _is_home(text: str) -> bool:
    """Return whether a text does not name an accelerator: the CPU, meta, or not a device."""
    try:
        return torch.device(text).type in HOME
    except RuntimeError:
        return True


# -- torch.load -----------------------------------------------------------------------------------


class _Thread(threading.local):
    """The number of blocks that the thread has entered."""

    depth = 0


THREAD = _Thread()


@functools.cache
def _register_restorer() -> None:
    """Add our restorer to torch's, once per process, because torch cannot remove one."""
    register_package(PRIORITY, lambda storage: None, _restore_on_cpu)


def _restore_on_cpu(storage: Any, location: str) -> Any:
    """Move a storage to the CPU if its location is an accelerator; do nothing outside blocks."""
    return storage if THREAD.depth and location.split(":")[0] not in HOME else None
