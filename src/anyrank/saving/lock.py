"""A run folder has one writer: a lock file with its process, which is there in one step or not.

It is written beside its place and linked to it, which only one process can do. Its time is that of
the owner's last sign of life. Object stores have no lock.
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
from anyrank.world.processes import has_ended, is_alive, own_process

log = logging.getLogger("anyrank.saving")

LOCK = ".lock"
RENEW_FRACTION = 10  # renewed this often within the time after which it counts as stale
MAX_BYTES = 4096  # of a lock
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

    def take(self, check: Callable[[], None] = lambda: None) -> None:
        """Become the folder's writer, or make sure to be it still. Before each save.

        Args:
            check: raises what else is against a new writer, while nobody else can become one.

        Raises:
            CheckpointError: another process is, and is alive or was a short time ago; or one has
                become it since, which must not be mixed with.
        """
        if self.held:
            self._look_after()
        else:
            with storing(self.folder):
                self._acquire()
            self.held = True
            try:
                check()
            except Exception:
                self.release()
                raise
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
        if self.held and time.monotonic() - self.renewed > LOCK_SEC.get() / RENEW_FRACTION:
            self._look_after()

    def release(self) -> None:
        """Remove the lock if it is still ours. A failure is a warning, as in `renew`."""
        if not self.held:
            return
        self.held = self.lost = False
        try:
            if self.store.renames and (self._read() or {}).get("token") == self.token:
                self.store.remove(self.path)
        except OSError as error:
            log.warning("%s: the lock was not removed: %s", self.path, error)

    def _acquire(self) -> None:
        self.store.make_folder(self.folder)
        if not self.store.renames:
            return
        with self._written() as fresh:
            for _ in range(TRIES):
                if _link(fresh, self.path):
                    return
                holder = self._read()
                if holder is None:
                    continue  # it was released meanwhile
                # Both files have their times from the storage's one clock.
                silent_sec = os.stat(fresh).st_mtime - self._renewed_at()
                if not _is_stale(holder, silent_sec):
                    raise CheckpointError(
                        f"{self.folder}: another run writes here: {_in_words(holder, silent_sec)}: "
                        f"stop it, or use another folder; remove {LOCK} if it is surely dead, or a "
                        "copy of its folder"
                    )
                if self._replace(holder, fresh):
                    return
        raise CheckpointError(
            f"{self.folder}: other runs start here at the same time: stop them, and remove {LOCK} "
            "if there are none"
        )

    @contextlib.contextmanager
    def _written(self) -> Generator[str]:
        """Our lock in a file beside its place, for as long as it takes to link it."""
        fresh = f"{self.path}.{self.token}"
        table = own_process() | {"host": socket.gethostname(), "token": self.token}
        write_file(self.store, fresh, json.dumps(table).encode())
        try:
            yield fresh
        finally:
            self.store.remove(fresh)
        self.renewed = time.monotonic()

    def _replace(self, stale: dict[str, Any], fresh: str) -> bool:
        """Put our lock in the place of a stale one; False when that was another's turn."""
        claim = f"{self.path}.{stale.get('token')}"  # which one process alone can make
        if not _link(fresh, claim):
            return False
        try:
            if (self._read() or {}).get("token") != stale.get("token"):
                return False
            self.store.rename(claim, self.path)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(claim)

    def _look_after(self) -> None:
        """Notice a lock that is not ours any more, never replace it, and renew one that is."""
        if self.lost or not self.store.renames:
            return
        try:
            holder = self._read()
            if holder is None:  # it was removed by hand
                with self._written() as fresh:
                    self.lost = not _link(fresh, self.path)
            elif holder.get("token") != self.token:
                self.lost = True
            else:
                os.utime(self.path)
                self.renewed = time.monotonic()
        except (OSError, CheckpointError) as error:
            log.warning("%s: the lock was not renewed: %s", self.path, error)

    def _read(self) -> dict[str, Any] | None:
        """The holder; empty for a file that is no lock, None for none."""
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
        """When the holder last gave a sign of life; now for a lock that is gone."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.path).st_mtime
        return time.time()

    def _owner(self) -> str:
        with contextlib.suppress(OSError):
            holder = self._read()
            if holder:
                return _in_words(holder, time.time() - self._renewed_at())
        return "its owner is unknown"


def _link(old: str, new: str) -> bool:
    """Give a file a second name; False when there is a file of that name."""
    try:
        os.link(old, new)
    except FileExistsError:
        return False
    return True


def _is_stale(holder: dict[str, Any], silent_sec: float) -> bool:
    """Whether the owner is surely dead, or long silent where nothing else can be known of it."""
    here, holder = own_process(), {"started": "", **holder}
    is_local = holder.get("host") == socket.gethostname()
    if is_local and holder.get("boot") not in (here["boot"], None):
        return True  # the machine was started again
    if not is_local or not isinstance(holder.get("pid"), int):
        return silent_sec > LOCK_SEC.get()
    # A lock of this very process is an earlier one of its own, which was never released.
    if has_ended(holder) or (is_alive(holder) and holder["pid"] == here["pid"]):
        return True
    # Containers of one machine number their processes each for themselves.
    return not is_alive(holder) and silent_sec > LOCK_SEC.get()


def _in_words(holder: dict[str, Any], silent_sec: float) -> str:
    seen = f"last seen {max(0.0, silent_sec):.0f} s ago"
    return f"process {holder.get('pid')} on {holder.get('host')}, {seen}"
