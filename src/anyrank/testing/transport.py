"""The messages between a call and its ranks: pickled jobs and values.

A pickle names functions and classes by their modules, which a rank imports with the `sys.path` of
the caller.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.testing.fault import Fault

MET = "met"  # from a rank: it is set up, and connected to all others
GO = "go"  # to a rank: all ranks have met
END = "end"  # to a rank: all ranks of the call have answered
READY = "ready"  # from a rank: it is cleaned up
unpacking: list[str] = []  # the job whose module this rank is importing


@dataclass(frozen=True)
class Task:
    """One call for one rank. `store` is the file of a FileStore; None for no process group."""

    rank: int
    world_size: int
    store: str | None
    environ: dict[str, str]
    cwd: str
    path: list[str]
    name: str
    job: bytes
    faults: Sequence[Fault]


@dataclass(frozen=True)
class Reached:
    """The message that a rank has reached a fault, and is about to fail."""

    fault: Fault


@dataclass(frozen=True)
class Returned:
    """The value that the job of a rank returned, pickled."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """The formatted traceback of a job that raised, and its exception if it can be pickled."""

    text: str
    error: bytes | None


def pack(job: Any) -> bytes:
    """Pickle a job with its arguments.

    Raises:
        ValueError: a part of it cannot be sent to another process.
        RuntimeError: ranks that import the module of the job would start ranks themselves.
    """
    if unpacking:
        raise RuntimeError(
            f"the module of {unpacking[-1]} starts ranks when it is imported, and each rank "
            'imports it. Move the call under `if __name__ == "__main__":`, or into a test'
        )
    if job[0].__module__ == "__main__":
        raise ValueError(
            f"{job[0]!r} is defined in a script, prompt, notebook or -c, which the ranks cannot "
            "import. Define the job in a module, and import it"
        )
    try:
        return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{job[0]!r} or one of its arguments cannot be sent to the ranks: {error}. A job must "
            "be a function at the top level of a module, with picklable arguments"
        ) from error


def unpack(task: Task) -> Any:
    """Unpickle a job with its arguments, which imports their modules."""
    unpacking.append(task.name)
    importlib.invalidate_caches()  # the module may be newer than the cached listing of its folder
    try:
        return pickle.loads(task.job)  # noqa: S301 - the owner's own bytes
    finally:
        unpacking.pop()


def describe(error: BaseException, skip: int) -> Raised:
    """Return an exception as a message, without its first `skip` frames."""
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
    """Return the name of a job for messages."""
    name = getattr(job, "__qualname__", None)
    return f"{job.__module__}.{name}" if name else repr(job)
