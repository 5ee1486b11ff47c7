"""The messages between a call and its ranks: pickled jobs and values.

A pickle names functions and classes by module, which a rank imports, from the caller's `sys.path`.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.testing.fault import Fault

MET = "met"  # from a rank: set up, and connected to all others
GO = "go"  # to a rank: all are
END = "end"  # to a rank: all ranks of the call have answered
READY = "ready"  # from a rank: cleaned up
unpacking: list[str] = []  # the job whose module this rank imports


@dataclass(frozen=True)
class Task:
    """One call for one rank. `store` is the file of the FileStore, None for no process group."""

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


def pack(job: Any) -> bytes:
    """Pickle a job with its arguments.

    Raises ValueError if something in it can only exist in this process, and RuntimeError if
    importing its module would start the ranks that import it, and so on.
    """
    if unpacking:
        raise RuntimeError(
            f"the module of {unpacking[-1]} starts ranks while it is imported, which each rank "
            'does: put the call under `if __name__ == "__main__":`, or in a test'
        )
    if job[0].__module__ == "__main__":
        raise ValueError(
            f"{job[0]!r} is a job of a script, prompt, notebook or -c, which the ranks cannot "
            "import: define the job in a module and import it"
        )
    try:
        return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{job[0]!r} or one of its arguments cannot be sent to the ranks: {error}. A job is a "
            "function at the top level of a file; its arguments must be picklable."
        ) from error


def unpack(task: Task) -> Any:
    """A job with its arguments, whose modules this imports."""
    unpacking.append(task.name)
    importlib.invalidate_caches()  # the module may be younger than the last look into its folder
    try:
        return pickle.loads(task.job)  # noqa: S301 - the owner's own bytes
    finally:
        unpacking.pop()


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
