"""Two ranks that wait for each other in different calls would do so until the timeout.

So a rank that has waited for long says on a board, which is in the store that all ranks share,
where it waits and for whom, and looks there whether one of these waits for it. Only waits of main
threads count: what a background thread waits for, the main thread may be about to send.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from anyrank.world.group import SHOWN
from anyrank.world.store import Store

reached: dict[str, int] = {}  # group of this process -> number of its newest wait


class Board:
    """What one rank's wait is on the board, until it is closed.

    Args:
        store: shared by all processes of the job.
        rank: this process's own.
        where: the group, or the meeting, that it waits in.
        what: it waits for, for messages.
        number: of the wait in that group.
    """

    def __init__(self, store: Store, rank: int, where: str, what: str, number: int) -> None:
        self.store, self.rank = store, rank
        self.where, self.what, self.number = where, what, number
        self.found = ""

    def look(self, absent: Sequence[int]) -> str:
        """Say for whom this rank waits; which of them waits for it, in words, once that is sure."""
        mine: dict[str, Any] = {
            "where": self.where,
            "what": self.what,
            "number": self.number,
            "ranks": list(absent),
            "reached": {**reached},  # other threads add to it
        }
        self.store.set(f"stuck/{self.rank}", json.dumps(mine))
        if told := self.told():
            return told
        before, self.found = self.found, ""
        crossed = {rank: theirs for rank in absent[:SHOWN] if (theirs := self._crossed_by(rank))}
        for rank, theirs in crossed.items():
            self.found = self.found or (
                f"rank {self.rank} is at {self.what!r} and rank {rank} at {theirs['what']!r}, and "
                "each waits for the other: make the same calls on all ranks, in the same order"
            )
        if self.found != before:  # until it is seen twice, it may be a moment in between
            return ""
        for rank, theirs in crossed.items():
            note = {"wait": [theirs["where"], theirs["number"]], "text": self.found}
            self.store.set(f"crossed/{rank}", json.dumps(note))
        return self.found

    def _crossed_by(self, rank: int) -> dict[str, Any]:
        """The wait of a rank that waits for this one, and is waited for by it; or nothing.

        A rank that has passed this wait, or whose wait this rank has passed, waits for others.
        """
        theirs = json.loads(self.store.get(f"stuck/{rank}") or '{"ranks": []}')
        crosses = (
            self.rank in theirs["ranks"]
            and theirs["reached"].get(self.where, 0) < self.number
            and reached.get(theirs["where"], 0) < theirs["number"]
        )
        return theirs if crosses else {}

    def told(self) -> str:
        """What another rank has found out of this wait, or nothing."""
        note = json.loads(self.store.get(f"crossed/{self.rank}") or "{}")
        return note["text"] if note.get("wait") == [self.where, self.number] else ""

    def close(self) -> None:
        """Take the wait off the board."""
        self.store.delete(f"stuck/{self.rank}")


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
