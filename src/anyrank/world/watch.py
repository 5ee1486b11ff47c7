"""One thread for each open group: it breaks the silence while its rank waits for others, and
answers for the process when another rank asks who is alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from anyrank.world import background
from anyrank.world.group import SHOWN
from anyrank.world.meeting import WARN_SEC
from anyrank.world.processes import has_ended
from anyrank.world.store import Store, StoreLost

log = logging.getLogger("anyrank.world")

TICK_SEC = 1.0  # how soon a waiting rank is known to wait, and a living one to live
ANSWER_SEC = 5.0  # of the store, before a warning is given without it


class Watch:
    """Watches one rank's waiting in one group.

    Args:
        store: the group's own part of the store.
        rank: this process's global rank.
        ranks: all global ranks of the group.
        name: ranks in words.
        group: the connections, which the thread lets go of last: closing them takes 10 ms a rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        name: Callable[[Sequence[int]], str],
        group: Any,
    ) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.name = name
        self.number = 0  # of the wait; ranks count alike, as all of them make the same ones
        self.what = ""
        self.since = 0.0  # 0 outside of a wait
        self.closed = threading.Event()
        self.posted = 0
        self.due_sec = WARN_SEC
        self.answered = False
        self.processes: dict[int, dict[str, Any]] = {}  # of the ranks on this machine
        self.in_vain = ""  # why no wait of this group may ever end
        background.start("anyrank-watch", partial(self._run, [group]), self.close)

    def begin(self, what: str) -> None:
        """This rank begins to wait for the others."""
        self.number += 1
        self.what = what
        self.since = time.monotonic()

    def end(self) -> None:
        """The other ranks are here."""
        self.since = 0.0

    def close(self) -> None:
        """End the thread. Does not wait."""
        self.closed.set()

    def _run(self, group: list[Any]) -> None:
        while not self.closed.wait(TICK_SEC):
            try:
                self._tick()
            except StoreLost as error:
                if self._is_due():
                    self._warn(f": {error}")
        self.store.close()
        group.clear()

    def _tick(self) -> None:
        if not self.answered and self.store.has(["roll call"], ANSWER_SEC):
            self.answered = True
            self.store.set(f"alive/{self.rank}")
            self.in_vain = "another rank has left the group"
        if self.since and not self.in_vain:
            gone = [rank for rank, process in self.processes.items() if has_ended(process)]
            self.in_vain = f"{self.name(gone)} ended" if gone else ""
        number, waits = self.number, bool(self.since)
        if self.posted and (self.posted != number or not waits):
            self.store.delete(f"waits/{self.posted}/{self.rank}")
            self.posted, self.due_sec = 0, WARN_SEC
        if waits and not self.posted:
            self.posted = number
            self.store.set(f"waits/{number}/{self.rank}")
        if self._is_due():
            keys = [f"waits/{number}/{rank}" for rank in self.ranks]
            absent = [self.ranks[i] for i in self.store.absent(keys, SHOWN + 1, ANSWER_SEC)]
            self._warn(f" for {self.name(absent)}" if absent else " although all ranks have come")

    def _is_due(self) -> bool:
        return bool(self.since) and time.monotonic() - self.since > self.due_sec

    def _warn(self, text: str) -> None:
        since = self.since or time.monotonic()
        self.due_sec *= 2
        seconds = round(time.monotonic() - since)
        log.warning("%s: rank %d has waited %d s%s", self.what, self.rank, seconds, text)
