"""One thread for each open group: it breaks the silence while its rank waits for others, and
answers for the process when another rank asks who is alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from anyrank.world import background
from anyrank.world.crossed import Board, is_main_thread, reached
from anyrank.world.group import SHOWN, default_store
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
        self.key = store.prefix  # which no other group has
        self.number = 0  # of the wait; ranks count alike, as all of them make the same ones
        self.what = ""
        self.since = 0.0  # 0 outside of a wait
        self.closed = threading.Event()
        self.posted = 0
        self.due_sec = WARN_SEC
        self.answered = False
        self.processes: dict[int, dict[str, Any]] = {}  # of the ranks on this machine
        self.in_vain = ""  # why no wait of this group may ever end
        self.crossed = ""  # the same, where another rank waits for this one elsewhere
        self.board: Board | None = None
        self.is_main = False
        background.start("anyrank-watch", partial(self._run, [group]), self.close)

    def begin(self, what: str) -> None:
        """This rank begins to wait for the others."""
        self.number += 1
        reached[self.key] = self.number
        self.what, self.is_main = what, is_main_thread()
        self.since = time.monotonic()

    def end(self) -> None:
        """The other ranks are here."""
        self.since = 0.0

    def close(self) -> None:
        """End the thread. Does not wait."""
        self.closed.set()
        reached.pop(self.key, None)

    def _run(self, group: list[Any]) -> None:
        while not self.closed.wait(TICK_SEC):
            try:
                self._tick()
            except StoreLost as error:
                if self._is_due():
                    self._warn(f": {error}")
        with contextlib.suppress(StoreLost):
            self._leave_board()
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
            self._leave_board()
        if waits and not self.posted:
            self.posted = number
            self.store.set(f"waits/{number}/{self.rank}")
        if self._is_due(WARN_SEC):
            keys = [f"waits/{number}/{rank}" for rank in self.ranks]
            absent = [self.ranks[i] for i in self.store.absent(keys, SHOWN + 1, ANSWER_SEC)]
            if self._is_due():
                who = f" for {self.name(absent)}" if absent else " although all ranks have come"
                self._warn(who)
            if self.is_main and not self.in_vain:
                self._look_across(number, absent)

    def _look_across(self, number: int, absent: Sequence[int]) -> None:
        """Whether one of those for whom this rank waits is waiting for it, in another call."""
        if not dist.is_initialized():  # destroyed meanwhile, and its store with it
            return
        if self.board is None:
            shared = Store(default_store(), "anyrank")
            self.board = Board(shared, self.rank, self.key, self.what, number)
        self.crossed = self.in_vain = self.board.look(absent)

    def why(self) -> str:
        """Why a wait that broke off was in vain, where another rank has said so."""
        if not self.crossed and (board := self.board) is not None:
            with contextlib.suppress(StoreLost):
                self.crossed = board.told()
        return self.crossed

    def _leave_board(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board.store.close()
            self.board = None

    def _is_due(self, seconds: float | None = None) -> bool:
        """Whether it has waited for so long, at first until a warning is due."""
        seconds = self.due_sec if seconds is None else seconds
        return bool(self.since) and time.monotonic() - self.since > seconds

    def _warn(self, text: str) -> None:
        since = self.since or time.monotonic()
        self.due_sec *= 2
        seconds = round(time.monotonic() - since)
        log.warning("%s: rank %d has waited %d s%s", self.what, self.rank, seconds, text)
