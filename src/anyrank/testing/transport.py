"""The messages between a call and its ranks: pickled jobs and values, and the modules they need.

A pickle names functions and classes by module. A rank imports such a module by its name if that
finds the same file; otherwise it runs the file under that name. So jobs may be defined in test
modules that cannot be imported, and in a script's `__main__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from anyrank.testing.fault import Fault

# The name of a script that is imported instead of run, as in multiprocessing, which also makes it
# an alias of the caller's own __main__.
MAIN = "__mp_main__"
MET = "met"  # from a rank: set up, and connected to all others
GO = "go"  # to a rank: all are
END = "end"  # to a rank: all ranks of the call have answered
READY = "ready"  # from a rank: cleaned up
loaded: dict[str, ModuleRef] = {}
being_imported: list[str] = []  # files of the caller that this rank is running, to import them


class ModuleRef(NamedTuple):
    """A module of the caller: its name, file, the file's mtime in ns, and the package it is in."""

    name: str
    file: str
    mtime_ns: int
    package: str | None


@dataclass(frozen=True)
class Task:
    """One call for one rank. `store` is the file of the FileStore, None for no process group."""

    rank: int
    world_size: int
    store: str | None
    environ: dict[str, str]
    cwd: str
    path: list[str]
    modules: list[ModuleRef]
    job: bytes
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Reached:
    """A rank has reached a fault, and is about to fail."""

    fault: Fault


@dataclass(frozen=True)
class Returned:
    """A rank's job returned this value, pickled."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """A rank's job raised: the formatted traceback, and the exception if it can be pickled."""

    text: str
    error: bytes | None


class _Recorder(pickle.Pickler):
    """A pickler that records the modules of all functions and classes that it names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Record the module; the pickling itself is unchanged."""
        if isinstance(obj, type | FunctionType):
            self.modules.add(obj.__module__)
        return NotImplemented


def pack(job: Any) -> tuple[bytes, list[ModuleRef]]:
    """Pickle a job with its arguments. Returns the pickle, and the modules that it names.

    Raises ValueError if something in it can only exist in this process, and RuntimeError if
    importing a script would start ranks that import it, and so on.
    """
    if being_imported:
        raise RuntimeError(
            f"{being_imported[-1]}: starts ranks while it is imported, which each rank does: put "
            'the call under `if __name__ == "__main__":`'
        )
    buffer = io.BytesIO()
    recorder = _Recorder(buffer)
    try:
        recorder.dump(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{job[0]!r} or one of its arguments cannot be sent to the ranks: {error}. A job is a "
            "function at the top level of a file; its arguments must be picklable."
        ) from error
    refs = [refer(sys.modules[name]) for name in sorted(recorder.modules) if name in sys.modules]
    return buffer.getvalue(), [ref for ref in refs if ref is not None]


def refer(module: ModuleType) -> ModuleRef | None:
    """The reference by which a rank imports this module; None if it has no Python file."""
    file = getattr(module, "__file__", None)
    if file is not None and file.endswith(".py"):
        file = os.path.abspath(file)
        return ModuleRef(module.__name__, file, os.stat(file).st_mtime_ns, module.__package__)
    if module.__name__ == "__main__":
        raise ValueError(
            "a job from a prompt, notebook or -c has no file that the ranks could import: "
            "define the job in a module and import it"
        )
    return None


def fetch(ref: ModuleRef) -> None:
    """Import this module of the caller under its name, in the caller's version."""
    module = sys.modules.get(ref.name)
    known = loaded.get(ref.name)
    if ref == known:
        return
    if known is not None or getattr(module, "__file__", None) != ref.file:
        sys.modules.pop(ref.name, None)
        being_imported.append(ref.file)
        try:
            if _leads_to_file(ref):
                importlib.import_module(ref.name)
            else:
                _run_file(ref)
        finally:
            being_imported.pop()
    loaded[ref.name] = ref


def _leads_to_file(ref: ModuleRef) -> bool:
    """Return whether a plain import of the name finds the same file."""
    if ref.name == "__main__":
        return False
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(ref.name)
    except ImportError:  # a missing parent package
        return False
    return spec is not None and spec.origin == ref.file


def _run_file(ref: ModuleRef) -> None:
    """Run a file as the module of this name."""
    name = MAIN if ref.name == "__main__" else ref.name
    spec = importlib.util.spec_from_file_location(name, ref.file)
    assert spec is not None  # it is a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if name == MAIN:
        # `python -m package.module`: relative imports need the package, which is not in the name.
        module.__spec__, module.__package__ = None, ref.package
        sys.modules["__main__"] = module
    parents = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
    for parent in parents:  # without the parents, pickle does not find the module
        sys.modules.setdefault(parent, ModuleType(parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def describe(error: BaseException, skip: int) -> Raised:
    """An exception as a message, without its first `skip` frames."""
    tb = error.__traceback__
    for _ in range(skip):
        tb = tb.tb_next if tb is not None else None
    text = "".join(traceback.format_exception(type(error), error, tb))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    return Raised(text, pickled)


def name_of(job: Any) -> str:
    """A job's name for messages."""
    name = getattr(job, "__qualname__", None)
    return f"{job.__module__}.{name}" if name else repr(job)
