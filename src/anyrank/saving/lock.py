"""The lock of a run folder: a file that names the one process that may write there.

A process writes the file beside its path and links it there: link() fails if the path exists. The
file's time is the owner's last sign of life. Object stores have no lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.storage import Storage, join_path, storing, write_file
from anyrank.settings import LOCK_SEC
from anyrank.world.processes import describe_own_process, has_ended, is_alive

log = logging.getLogger("anyrank.saving")

LOCK = ".lock"
RENEW_FRACTION = 10  # how often a lock is renewed within the time after which it is stale
MAX_BYTES = 4096  # of a lock
TRIES = 10  # to take a lock that others try to take as well; each time one of them succeeds


class RunLock:
    """The lock of a run folder. Used by one rank, the first.

    Attributes:
        is_held: whether it was taken, and not released.
        is_lost: whether another process has taken it since; then no save may follow.
    """

    def __init__(self, store: Storage, folder: str) -> None:
        self.store, self.folder = store, folder
        self.path = join_path(folder, LOCK)
        self.token = uuid.uuid4().hex
        self.renewed = 0.0
        self.is_held = self.is_lost = False

    def take(self, check: Callable[[], None] = lambda: None) -> None:
        """Become the folder's writer, or check that this process still is. Before each save.

        Args:
            check: called with the new lock; raises an error if the folder is not this run's.

        Raises:
            CheckpointError: another process has the lock, and is alive or was a short time ago; or
                another has taken the lock of this one.
        """
        if self.is_held:
            self._check_and_renew()
        else:
            with storing(self.folder):
                self._acquire()
            self.is_held = True
            try:
                check()
            except Exception:
                self.release()
                raise
        if self.is_lost:
            raise CheckpointError(
                f"{self.folder}: another run has taken it over ({self._describe_owner()}), and "
                "this one saves no more here: stop one of them; a run loses its folder if its "
                f"{LOCK} is removed, or not renewed for {LOCK_SEC.get():g} s (ANYRANK_LOCK_SEC)"
            )

    def renew(self) -> None:
        """Give a sign of life; cheap when called often. A failure is a warning.

        One rank calls this between agreements, where it may not raise. If another process has taken
        the lock, the next `take` raises.
        """
        if self.is_held and time.monotonic() - self.renewed > LOCK_SEC.get() / RENEW_FRACTION:
            self._check_and_renew()

    def release(self) -> None:
        """Remove the lock if it is still ours. A failure is a warning, as in `renew`."""
        if not self.is_held:
            return
        self.is_held = self.is_lost = False
        try:
            if self.store.renames and (self._read() or {}).get("token") == self.token:
                self.store.remove(self.path)
        except OSError as error:
            log.warning("%s: the lock was not removed: %s", self.path, error)

    def _acquire(self) -> None:
        self.store.make_folder(self.folder)
        if not self.store.renames:
            return
        with self._write_own() as own_path:
            for _ in range(TRIES):
                if _link(own_path, self.path):
                    return
                holder = self._read()
                if holder is None:
                    continue  # it was released meanwhile
                # Both files have times of the storage's clock, not of the machines' clocks.
                silent_sec = os.stat(own_path).st_mtime - self._renewed_at()
                if not _is_stale(holder, silent_sec):
                    raise CheckpointError(
                        f"{self.folder}: another run writes here: "
                        f"{_describe_holder(holder, silent_sec)}: stop it, or use another folder; "
                        f"if it is surely dead, or this is a copy of its folder, remove {LOCK}"
                    )
                if self._replace(holder, own_path):
                    return
        raise CheckpointError(
            f"{self.folder}: other runs start here at the same time: stop them, and remove {LOCK} "
            "if there are none"
        )

    @contextlib.contextmanager
    def _write_own(self) -> Generator[str]:
        """Write this process's lock beside the lock's path, and remove that file afterwards."""
        own_path = f"{self.path}.{self.token}"
        process = describe_own_process() | {"host": socket.gethostname(), "token": self.token}
        write_file(self.store, own_path, json.dumps(process).encode())
        try:
            yield own_path
        finally:
            self.store.remove(own_path)
        self.renewed = time.monotonic()

    def _replace(self, stale: dict[str, Any], own_path: str) -> bool:
        """Replace a stale lock by ours; False if another process does."""
        claim = f"{self.path}.{stale.get('token')}"  # only one process can link it
        if not _link(own_path, claim):
            return False
        try:
            if (self._read() or {}).get("token") != stale.get("token"):
                return False
            self.store.rename(claim, self.path)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(claim)

    def _check_and_renew(self) -> None:
        """Renew the lock if it is still ours; else set `is_lost`."""
        if self.is_lost or not self.store.renames:
            return
        try:
            holder = self._read()
            if holder is None:  # it was removed by hand
                with self._write_own() as own_path:
                    self.is_lost = not _link(own_path, self.path)
            elif holder.get("token") != self.token:
                self.is_lost = True
            else:
                os.utime(self.path)
                self.renewed = time.monotonic()
        except (OSError, CheckpointError) as error:
            log.warning("%s: the lock was not renewed: %s", self.path, error)

    def _read(self) -> dict[str, Any] | None:
        """The holder; empty for a file that is no lock, None without a file."""
        data = bytearray(MAX_BYTES)
        try:
            with closing(self.store.open(self.path)) as file:
                holder = json.loads(data[: file.readv([memoryview(data)], 0)])
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _renewed_at(self) -> float:
        """When the holder last gave a sign of life; now if the lock is gone."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.path).st_mtime
        return time.time()

    def _describe_owner(self) -> str:
        with contextlib.suppress(OSError):
            holder = self._read()
            if holder:
                return _describe_holder(holder, time.time() - self._renewed_at())
        return "its owner is unknown"


def _link(old: str, new: str) -> bool:
    """Give a file a second name; False if a file has that name."""
    try:
        os.link(old, new)
    except FileExistsError:
        return False
    return True


def _is_stale(holder: dict[str, Any], silent_sec: float) -> bool:
    """Whether the owner is dead; if that is unknown, whether it was silent for ANYRANK_LOCK_SEC."""
    this_process, holder = describe_own_process(), {"started": "", **holder}
    is_local = holder.get("host") == socket.gethostname()
    if is_local and holder.get("boot") not in (this_process["boot"], None):
        return True  # the machine was started again
    if not is_local or not isinstance(holder.get("pid"), int):
        return silent_sec > LOCK_SEC.get()
    # A lock of this process is one that it took earlier and did not release.
    if has_ended(holder) or (is_alive(holder) and holder["pid"] == this_process["pid"]):
        return True
    # Each container of a machine has process ids of its own.
    return not is_alive(holder) and silent_sec > LOCK_SEC.get()


def _describe_holder(holder: dict[str, Any], silent_sec: float) -> str:
    last_seen = f"last seen {max(0.0, silent_sec):.0f} s ago"
    return f"process {holder.get('pid')} on {holder.get('host')}, {last_seen}"
