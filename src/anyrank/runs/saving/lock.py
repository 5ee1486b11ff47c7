"""The lock of a run folder, which lets only one process write to it.

It is a kernel lock (fcntl) on a file of the folder, so it ends with its process, however that ends,
and it is valid on all machines that share the disk. It belongs to the open file (F_OFD_SETLK), so
that a copy of the folder, which also opens and closes the file, does not release it. Forked workers
close their descriptors at once, and do not hold it. Object stores have no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable
from datetime import UTC, datetime

from anyrank.errors import CheckpointError
from anyrank.files.storage import Storage, join_path, storing

log = logging.getLogger("anyrank.saving")

LOCK = ".lock"
MAX_BYTES = 400  # of the owner's name
TRIES = 10  # to take a lock that others take and release meanwhile

_open_files: dict[str, int] = {}  # path -> descriptor, for all locks of this process


def _close_after_fork() -> None:
    for descriptor in _open_files.values():
        os.close(descriptor)
    _open_files.clear()


os.register_at_fork(after_in_child=_close_after_fork)


class RunLock:
    """The lock of a run folder. Only the first rank uses it.

    Each save takes it again, because a user may have removed the file. The file is kept open by its
    number: a Python file would be closed when an unclosed run is garbage-collected. Several runs of
    one process in one folder share it.

    Attributes:
        is_held: whether it was taken and not released.
    """

    def __init__(self, store: Storage, folder: str) -> None:
        self.store, self.folder = store, folder
        self.path = join_path(folder, LOCK)
        self.is_held = False

    @property
    def _descriptor(self) -> int | None:
        """The descriptor of the file; None in an object store, or if the lock is not held."""
        return _open_files.get(self.path)

    def take(self, check: Callable[[], None] = lambda: None) -> None:
        """Become the folder's writer, or verify that this process still is. Before every save.

        Args:
            check: called with a new lock; raises an error if the folder is not this run's.

        Raises:
            CheckpointError: another process has the lock, or the folder cannot be written.
        """
        was_held = self.is_held
        with storing(self.folder):
            self.store.make_folder(self.folder)
            if self.store.renames:
                self._acquire()
        self.is_held = True
        if not was_held:  # otherwise the folder was checked when this process started to write
            try:
                check()
            except Exception:
                self.release()
                raise

    def release(self) -> None:
        """Remove the file and release the lock, if it is still ours. A failure is a warning."""
        if self._descriptor is not None:
            try:
                # Another process may have the lock by now, and then the file belongs to it.
                self._ask_kernel(self._descriptor)
                if self._is_in_place(self._descriptor):
                    self.store.remove(self.path)
            except (OSError, CheckpointError) as error:
                log.warning("%s: the lock could not be removed: %s", self.path, error)
        self._let_go()

    def _acquire(self) -> None:
        """Take the lock on the file that is in the folder now."""
        for _ in range(TRIES):
            descriptor, is_new = self._descriptor, self._descriptor is None
            if descriptor is None:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                _open_files[self.path] = descriptor
            try:
                self._ask_kernel(descriptor)
                if self._is_in_place(descriptor):
                    if is_new:
                        _write_own_name(descriptor)
                    return
            except Exception:
                self._let_go()
                raise
            self._let_go()  # the owner, or a user, has removed the file meanwhile
        raise CheckpointError(
            f"{self.folder}: other runs keep taking and releasing the lock of this folder. Stop "
            "them."
        )

    def _ask_kernel(self, descriptor: int) -> None:
        """Lock the file; nothing changes if this process has already locked it."""
        try:
            whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)
        except (BlockingIOError, PermissionError):
            raise CheckpointError(
                f"{self.folder}: another run is writing to this folder ({_read_name(descriptor)}). "
                "Stop it, or use a different folder."
            ) from None
        except OSError as error:
            if not self.is_held:
                log.warning(
                    "%s: this file system does not support locks (%s), so anyrank cannot detect a "
                    "second job that writes to this folder. Make sure that only one does.",
                    self.folder,
                    error.strerror,
                )

    def _is_in_place(self, descriptor: int) -> bool:
        """Return True if the open file is the one that is in the folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        return False

    def _let_go(self) -> None:
        if (descriptor := _open_files.pop(self.path, None)) is not None:
            os.close(descriptor)
        self.is_held = False


def _write_own_name(descriptor: int) -> None:
    """Write the owner of the lock, for the error on other ranks, even on other machines."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    name = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, name.encode(), 0)
    os.fsync(descriptor)


def _read_name(descriptor: int) -> str:
    """Read the owner of the lock from the file."""
    name = os.pread(descriptor, MAX_BYTES, 0).decode(errors="replace").strip()
    return name or "a process that has just started"
