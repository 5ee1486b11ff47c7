"""A run folder has one writer: a lock file with owner, host and time, and stale ones told apart."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.storage import join_path, read_range
from anyrank.files.store import Store, storing, write_file
from anyrank.settings import LOCK_SEC

log = logging.getLogger("anyrank.resume")

LOCK = ".lock"
RENEW_FRACTION = 10  # renewed this often within the time after which it counts as stale


class RunLock:
    """The lock of a run folder. Used by one rank, the first."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self.path = join_path(folder, LOCK)
        self.token = uuid.uuid4().hex
        self.renewed = 0.0

    def take(self) -> None:
        """Become the folder's writer.

        Raises:
            CheckpointError: another process is, and is alive or was a short time ago.
        """
        with storing(self.folder):
            self.store.make_folder(self.folder)
            if self.store.is_file(self.path):
                holder = self._read()
                if holder is not None and not _is_stale(holder):
                    raise CheckpointError(
                        f"{self.folder}: another run writes here: process {holder.get('pid')} on "
                        f"{holder.get('host')}, last seen {_ago(holder)}: stop it, or use another "
                        f"folder; remove {LOCK} if it is surely dead"
                    )
                self.store.remove(self.path)
        self._write()

    def renew(self) -> None:
        """Say that the owner is alive; cheap when called often. A failure is a warning.

        It happens on one rank alone, between agreements: nothing may be raised there.
        """
        if time.monotonic() - self.renewed > LOCK_SEC.get() / RENEW_FRACTION:
            try:
                if self.store.is_file(self.path):
                    self.store.remove(self.path)
                self._write()
            except (OSError, CheckpointError) as error:
                log.warning("%s: the lock was not renewed: %s", self.path, error)

    def release(self) -> None:
        """Remove the lock if it is still ours. A failure is a warning, as in `renew`."""
        try:
            holder = self._read() if self.store.is_file(self.path) else None
            if holder is not None and holder.get("token") == self.token:
                self.store.remove(self.path)
        except OSError as error:
            log.warning("%s: the lock was not removed: %s", self.path, error)

    def _write(self) -> None:
        table = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot()}
        table |= {"token": self.token, "time": time.time()}
        write_file(self.store, self.path, json.dumps(table).encode())
        self.renewed = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        """The holder; None for a lock that was torn while it was written, or is gone."""
        try:
            file = self.store.open(self.path)
            try:
                data = read_range(file, self.path, 0, self.store.info(self.path).size)
            finally:
                file.close()
            table = json.loads(data)
            return table if isinstance(table, dict) else None  # pyright: ignore[reportUnknownVariableType]
        except (OSError, ValueError):
            return None


def _is_stale(holder: dict[str, Any]) -> bool:
    """Whether the owner is surely dead, on this machine, or long silent, on another."""
    if holder.get("host") == socket.gethostname():
        if holder.get("boot") != _boot():
            return True
        try:
            os.kill(int(holder["pid"]), 0)
        except (ProcessLookupError, KeyError, ValueError, TypeError):
            return True
        except PermissionError:
            return False
        return int(holder["pid"]) == os.getpid()
    return time.time() - float(holder.get("time", 0)) > LOCK_SEC.get()


def _ago(holder: dict[str, Any]) -> str:
    return f"{max(0.0, time.time() - float(holder.get('time', 0))):.0f} s ago"


def _boot() -> str:
    """What tells one start of the machine from the next, as process numbers begin anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
