"""A run folder has one writer: a lock file with owner, host and time, and stale locks recognised.

Local: the file is created exclusively, a stale one is renamed away first, and only one process can
rename it. Object stores have neither: there the last to write has it, and each save looks again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from contextlib import closing
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.storage import Storage, join_path, storing, write_file
from anyrank.settings import LOCK_SEC
from anyrank.world.device import boot_id
from anyrank.world.processes import is_running, own_process, pid_namespace

log = logging.getLogger("anyrank.saving")

LOCK = ".lock"
RENEW_FRACTION = 10  # renewed this often within the time after which it counts as stale
MAX_BYTES = 4096  # of a lock
TORN_SEC = 1.0  # after which a lock without content is that of a process which died in between
TRIES = 10  # to take a lock which others take as well; each time, one of them gets it


class RunLock:
    """The lock of a run folder. Used by one rank, the first.

    Attributes:
        held: whether it was taken, and not released.
        lost: another process has taken it since; no save may follow.
    """

    def __init__(self, store: Storage, folder: str) -> None:
        self.store, self.folder = store, folder
        self.path = join_path(folder, LOCK)
        self.token = uuid.uuid4().hex
        self.renewed = 0.0
        self.held = self.lost = False

    def take(self) -> None:
        """Become the folder's writer, or make sure to be it still. Before each save.

        Raises:
            CheckpointError: another process is, and is alive or was a short time ago; or one has
                become it since, which must not be mixed with.
        """
        if self.held:
            self._look_after(write=False)
        else:
            with storing(self.folder):
                self.store.make_folder(self.folder)
                self._acquire()
            self.held = True
        if self.lost:
            raise CheckpointError(
                f"{self.folder}: another run has taken it over ({self._owner()}), and this one "
                "saves no more here: stop one of them; a run loses its folder when it is silent "
                f"for longer than ANYRANK_LOCK_SEC, {LOCK_SEC.get():g} s, or its {LOCK} is removed"
            )

    def renew(self) -> None:
        """Say that the owner is alive; cheap when called often. A failure is a warning.

        It happens on one rank alone, between agreements: nothing may be raised there. That another
        process has the lock is raised by the next `take`.
        """
        if time.monotonic() - self.renewed > LOCK_SEC.get() / RENEW_FRACTION:
            self._look_after(write=True)

    def release(self) -> None:
        """Remove the lock if it is still ours. A failure is a warning, as in `renew`."""
        self.held = self.lost = False
        try:
            if self._is_ours(self._read(self.path)):
                self.store.remove(self.path)
        except OSError as error:
            log.warning("%s: the lock was not removed: %s", self.path, error)

    def _acquire(self) -> None:
        for _ in range(TRIES):
            seen = self._read(self.path)
            if seen is not None and _parse(seen) is None:
                time.sleep(TORN_SEC)  # its owner may be about to write it
                seen = self._read(self.path)
            holder = None if seen is None else self._by_the_clock_here(_parse(seen))
            if holder is not None and not _is_stale(holder):
                raise CheckpointError(
                    f"{self.folder}: another run writes here: {_in_words(holder)}: stop it, or use "
                    f"another folder; remove {LOCK} if it is surely dead, or a copy of its folder"
                )
            if (seen is None or self._clear(seen)) and self._create():
                return
        raise CheckpointError(f"{self.folder}: other runs start here at the same time: stop them")

    def _by_the_clock_here(self, holder: dict[str, Any] | None) -> dict[str, Any] | None:
        """The holder, its time as this machine counts: the clocks of two machines may differ.

        Both files have their times from the storage's one clock.
        """
        if holder is None or not self.store.renames or holder.get("host") == socket.gethostname():
            return holder
        probe = f"{self.path}.probe-{self.token[:8]}"
        write_file(self.store, probe, b"")
        try:
            silent_sec = os.stat(probe).st_mtime - os.stat(self.path).st_mtime
        except FileNotFoundError:
            return holder  # the lock is gone: whoever clears it first has it
        finally:
            self.store.remove(probe)
        return {**holder, "time": time.time() - silent_sec}

    def _clear(self, seen: bytes) -> bool:
        """Take a stale lock away; False when it was another's turn."""
        if not self.store.renames:
            return True
        aside = f"{self.path}.stale-{self.token[:8]}"
        try:
            self.store.rename(self.path, aside)
        except FileNotFoundError:
            return False
        if self._read(aside) != seen:  # somebody was faster, and this is their fresh lock
            self.store.rename(aside, self.path)
            return False
        self.store.remove(aside)
        return True

    def _create(self) -> bool:
        """Write a lock where none is; False when another process has done so."""
        try:
            self._write(self.path)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return self.store.renames or self._is_ours(self._read(self.path))

    def _look_after(self, write: bool) -> None:
        """Notice a lock that is not ours any more, never replace it, and renew one that is."""
        if self.lost:
            return
        try:
            seen = self._read(self.path)
            if seen is None:  # somebody has cleaned up
                self.lost = not self._create()
            elif not self._is_ours(seen):
                self.lost = True
            elif write:
                self._replace()
        except (OSError, CheckpointError) as error:
            log.warning("%s: the lock was not renewed: %s", self.path, error)

    def _replace(self) -> None:
        if not self.store.renames:
            self._write(self.path)
            return
        fresh = f"{self.path}.new"
        if self.store.is_file(fresh):
            self.store.remove(fresh)  # a renewal was killed
        self._write(fresh)
        self.store.rename(fresh, self.path)

    def _write(self, path: str) -> None:
        table = own_process() | {"host": socket.gethostname()}
        table |= {"token": self.token, "time": time.time()}
        write_file(self.store, path, json.dumps(table).encode())
        self.renewed = time.monotonic()

    def _read(self, path: str) -> bytes | None:
        """A lock's bytes, in one request as it may be replaced meanwhile; None for none."""
        data = bytearray(MAX_BYTES)
        try:
            with closing(self.store.open(path)) as file:
                return bytes(data[: file.readv([memoryview(data)], 0)])
        except FileNotFoundError:
            return None

    def _is_ours(self, seen: bytes | None) -> bool:
        holder = None if seen is None else _parse(seen)
        return holder is not None and holder.get("token") == self.token

    def _owner(self) -> str:
        try:
            holder = _parse(self._read(self.path) or b"")
        except OSError:
            holder = None
        return "its owner is unknown" if holder is None else _in_words(holder)


def _parse(seen: bytes) -> dict[str, Any] | None:
    """The holder; None for a lock that was torn while it was written."""
    try:
        table = json.loads(seen)
        float(table["time"])
    except (ValueError, TypeError, LookupError):
        return None
    return table


def _is_stale(holder: dict[str, Any]) -> bool:
    """Whether the owner is surely dead, or long silent where nothing else can be known of it."""
    if holder.get("host") != socket.gethostname():
        return _silent_sec(holder) > LOCK_SEC.get()
    if holder.get("boot") != boot_id():
        return True
    # Containers of one machine number their processes each for themselves.
    if holder.get("pid_namespace") != pid_namespace():
        return _silent_sec(holder) > LOCK_SEC.get()
    try:
        pid = int(holder["pid"])
    except (KeyError, ValueError, TypeError):
        return True
    # This process's own number: an earlier lock of its own, or of a process before it.
    return pid == os.getpid() or not is_running(pid, str(holder.get("started") or ""))


def _silent_sec(holder: dict[str, Any]) -> float:
    return max(0.0, time.time() - float(holder["time"]))


def _in_words(holder: dict[str, Any]) -> str:
    seen = f"last seen {_silent_sec(holder):.0f} s ago"
    return f"process {holder.get('pid')} on {holder.get('host')}, {seen}"
