"""Memory that outlives the ranks of `anyrank run`: a folder in the tmpfs of this machine.

The owner of a folder holds a lock on it, which the kernel releases when the owner ends in any way.
A folder whose lock is free has therefore lost its owner, and the next `anyrank run` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator

from anyrank.settings import PEERS_FOLDER

TMPFS = "/dev/shm"  # noqa: S108 - mkdtemp makes its folders, for this user only
PREFIX = "anyrank-run-"


@contextlib.contextmanager
def surviving_memory(tmpfs: str = TMPFS) -> Generator[dict[str, str]]:
    """Yield the environment variables that tell ranks a folder in memory; remove it at the end.

    Yields no variables if this machine has no such memory.
    """
    if not os.access(tmpfs, os.W_OK | os.X_OK):
        yield {}
        return
    _sweep(tmpfs)
    path = descriptor = None
    while descriptor is None:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=tmpfs)
        descriptor = _lock(path)
    try:
        yield {PEERS_FOLDER: str(path)}
    finally:
        shutil.rmtree(str(path), ignore_errors=True)
        os.close(descriptor)


def _sweep(tmpfs: str) -> None:
    """Remove folders whose owners were killed."""
    for entry in os.scandir(tmpfs):
        if (
            entry.name.startswith(PREFIX)
            and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        ):
            descriptor = _lock(entry.path)
            if descriptor is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(descriptor)


def _lock(path: str) -> int | None:
    """Return a descriptor that holds a folder's lock; None if the folder is gone or in use."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(path):
            return descriptor
    os.close(descriptor)
    return None
