"""`anyrank.cpu_only`: tensors stay on the CPU, whatever device a third-party loader asks for."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.serialization import register_package

from anyrank.errors import AnyrankError

CPU = torch.device("cpu")
HOME = ("cpu", "meta")  # device types that pass as they are
# Torch runs restorers in this order and 10 is its own first. Equal numbers make it compare the
# functions, which fails: so a number that nobody else is likely to use.
PRIORITY = -7919
MOVES = ("cuda", "xpu", "hpu", "mtia", "ipu")  # Tensor methods that name an accelerator
INDEX_POSITION = {"to": 1, "_parse_to": 0}  # functions that take a device index by position


@contextmanager
def cpu_only() -> Generator[None]:
    """Keep what any third-party loader makes on the CPU, and the accelerator uninitialised.

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

    Holds for the thread that enters and for threads started inside, nests, and ends with the block,
    also by an exception. Each rank enters by itself. What is on an accelerator already stays there.
    A `torch.device` made inside is the CPU for good. TorchScript files name their device in C++:
    give `torch.jit.load` a map_location.

    Raises:
        AnyrankError: inside, by a call that would initialise the accelerator and has no form for
            the CPU; names its file and line. Once the process has initialised it, such calls pass.
    """
    current = {each: each.current_device() for each in _backends() if _is_initialised(each)}
    _register_restorer()
    with PROCESS, torch.device(CPU), _Redirect():
        try:
            yield
        finally:
            for backend, index in current.items():
                backend.set_device(index)


class _Redirect(TorchFunctionMode):
    """Rewrites accelerators to the CPU in every torch call of the thread that holds it."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.accelerator.current_accelerator()
        self.moves = (*MOVES, own.type) if own is not None else MOVES

    def __enter__(self) -> _Redirect:
        self.before = getattr(THREAD, "block", None)
        THREAD.block = PROCESS.block
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        THREAD.block = self.before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_inside():  # on a thread that has outlived the block
            return func(*args, **kwargs)
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

_restorers: list[Callable[[Any, str], Any]] = []


def _register_restorer() -> None:
    """Add our restorer to torch's, once per process: torch has no way to take one out again."""
    if not _restorers:
        _restorers.append(_restore_on_cpu)
        register_package(PRIORITY, lambda storage: None, _restore_on_cpu)


def _restore_on_cpu(storage: Any, location: str) -> Any:
    """The storage as read, on the CPU, for a location that is an accelerator; outside, nothing."""
    return storage if _is_inside() and location.split(":")[0] not in HOME else None


# -- the process ----------------------------------------------------------------------------------

THREAD = threading.local()  # `block`: the number of the block that the thread is in


def _is_inside() -> bool:
    """Whether this thread is inside a block that is still open."""
    return getattr(THREAD, "block", None) == PROCESS.block


class _Process:
    """What a block changes for the whole process: done by the first to enter, undone by the last.

    Attributes:
        block: number of the block; blocks that overlap in time share one, and none has it again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.block = 0
        self.num_inside = 0
        self.changes = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.num_inside:
                self.changes.enter_context(_follow_threads())
                for backend in _backends():
                    self.changes.enter_context(_guard(backend))
            self.num_inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self.lock:
            self.num_inside -= 1
            if not self.num_inside:
                self.block += 1
                self.changes.close()


PROCESS = _Process()


@contextmanager
def _follow_threads() -> Generator[None]:
    """Keep threads that start meanwhile on the CPU: loaders read shards in pools of their own.

    The profile function of new threads is Python's one public way to run code in them. It puts back
    the one that was there at its first call.
    """
    before = threading.getprofile()

    def enter(frame: FrameType, event: Any, arg: Any) -> None:
        sys.setprofile(before)
        _Redirect().__enter__()
        if before is not None:
            before(frame, event, arg)

    threading.setprofile(enter)
    try:
        yield
    finally:
        threading.setprofile(before)  # pyright: ignore[reportArgumentType] - None takes it out


@contextmanager
def _guard(backend: Any) -> Generator[None]:
    """Refuse to initialise an accelerator inside the block.

    The one place where anyrank replaces an attribute of torch, and for the block only: torch has no
    hook before initialisation, and both its Python and its C++ look this function up when they need
    it. Two more modules hold it by a name of their own. A backend from outside torch need not go
    through it to choose a device.
    """
    holders = [backend, *(getattr(backend, name, None) for name in ("memory", "random"))]
    names = ("_lazy_init",) if backend in (torch.cuda, torch.xpu) else ("_lazy_init", "set_device")
    found = [
        (holder, name, getattr(holder, name))
        for holder in holders
        for name in names
        if hasattr(holder, name)
    ]

    def refuse(function: Callable[..., Any], *args: Any) -> Any:
        if _is_inside() and not _is_initialised(backend):
            name = backend.__name__
            raise AnyrankError(
                f"{_caller()}: this call initialises {name} inside anyrank.cpu_only(), which keeps "
                f"loaders off the accelerator, and it has no form for the CPU: call it outside, or "
                f"give the rank its device before the block ({name}.set_device(LOCAL_RANK))"
            )
        return function(*args)

    for holder, name, function in found:
        setattr(holder, name, functools.partial(refuse, function))
    try:
        yield
    finally:
        for holder, name, function in found:
            setattr(holder, name, function)


def _backends() -> list[Any]:
    """The modules of accelerators that a loader may ask for."""
    own = torch.accelerator.current_accelerator()
    modules: list[Any] = [torch.cuda, torch.xpu]
    if own is not None and own.type not in ("cuda", "xpu"):
        modules.append(torch.get_device_module(own))
    return modules


def _is_initialised(backend: Any) -> bool:
    """Whether the process uses it already; of torch's own backends, MPS alone does not show it."""
    return hasattr(backend, "is_initialized") and backend.is_initialized()


def _caller() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    inside = (str(Path(torch.__file__).parent), __file__)
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"
