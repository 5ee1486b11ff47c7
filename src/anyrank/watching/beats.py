"""Heartbeats of the ranks, and the election of the one rank that diagnoses a hang, the judge.

Each rank writes its own heartbeat. Only the judge reads all of them, with one call of the store;
the other ranks read only that of the judge. A hang therefore costs a rank two keys per second on
any number of ranks, and a rank that was only late gets no second judge.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from anyrank.world.store import Store

SILENT_SEC = 5.0  # without a heartbeat, after which a rank is inspected from outside
REPLACED_SEC = 10.0  # without a heartbeat of the judge, after which another rank replaces it
READINGS = 4  # of a heartbeat before it is old: a reader without a core may have read it once
LEFT = "left"  # the last heartbeat of a rank whose watch has ended
ABSENT = "absent"  # in place of a heartbeat, for a rank that never had one


class Beat(NamedTuple):
    """The last heartbeat of a rank, as this rank has read it.

    Attributes:
        text: the text in the store: the number of steps, the seconds since the last one, and a part
            that makes it new; or LEFT, or ABSENT; or "" before the first reading.
        time: time of the first reading of this text.
        readings: number of readings of this text.
    """

    text: str = ""
    time: float = 0.0
    readings: int = 0

    def read(self, text: str) -> Beat:
        """Return the heartbeat after another reading."""
        if text == self.text:
            return self._replace(readings=self.readings + 1)
        return Beat(text, time.monotonic(), 1)

    @property
    def watches(self) -> bool:
        """True if the rank has had a heartbeat, and has not ended its watch."""
        return self.text not in ("", LEFT, ABSENT)

    def is_old(self, seconds: float) -> bool:
        """Return whether the rank has had no new heartbeat for a number of seconds."""
        return time.monotonic() - self.time > seconds and self.readings >= READINGS

    @property
    def lives(self) -> bool:
        """True if the rank watches, and had a heartbeat recently."""
        return self.watches and not self.is_old(SILENT_SEC)

    @property
    def steps(self) -> int:
        """Number of steps that the rank has made."""
        return int(self.text.split()[0]) if self.watches else 0

    @property
    def idle_sec(self) -> float:
        """Seconds since the last step of the rank, which must have a heartbeat."""
        return float(self.text.split()[1]) + time.monotonic() - self.time


class Beats:
    """The heartbeats of all ranks: this rank publishes its own, and reads those of others.

    Rank 0 is the judge. If it has no heartbeat for REPLACED_SEC, the lowest rank that has one
    replaces it permanently; the store records which rank was first.

    Args:
        store: the store of the watch.
        rank, size: this rank, and the number of ranks of the job.

    Attributes:
        last: the heartbeat of each rank, as last read by `listen`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._keys = [f"beat/{rank}" for rank in range(size)]
        self.last = [Beat()] * size
        self._term, self._judge, self._judges_beat = 0, 0, Beat("unread")

    def give(self, steps: int, idle_sec: float) -> None:
        """Publish a heartbeat."""
        self._store.set(self._keys[self._rank], f"{steps} {idle_sec:.3f} {time.monotonic()}")

    def leave(self) -> None:
        """Publish that the watch of this rank has ended."""
        self._store.set(self._keys[self._rank], LEFT)

    def listen(self) -> None:
        """Read the heartbeats of all ranks, with a single call once each rank has a key."""
        if not self._store.has(self._keys):
            for rank in self._store.find_absent(self._keys, self._size):
                self._store.set_first(self._keys[rank], ABSENT)
        values = self._store.call(lambda store: store.multi_get(self._keys))
        self.last = [
            beat.read(value.decode()) for beat, value in zip(self.last, values, strict=True)
        ]

    def find_judge(self) -> bool:
        """Find the judge; return whether it is this rank."""
        while successor := self._store.get(f"judge/{self._term + 1}"):
            self._term, self._judge = self._term + 1, int(successor)
            self._judges_beat = Beat("unread")
        if self._judge == self._rank:
            return True
        self._judges_beat = self._judges_beat.read(self._store.get(self._keys[self._judge]))
        if self._judges_beat.text != LEFT and not self._judges_beat.is_old(REPLACED_SEC):
            return False
        self.listen()
        lower = (beat for rank, beat in enumerate(self.last[: self._rank]) if rank != self._judge)
        if not any(beat.lives for beat in lower):
            self._store.set_first(f"judge/{self._term + 1}", str(self._rank))
        return False  # the next call reads which rank was first

    def steps(self) -> int:
        """Return the number of steps of all ranks together."""
        return sum(beat.steps for beat in self.last)

    def idle_sec(self) -> float:
        """Return the seconds since the last step of any rank."""
        return min((beat.idle_sec for beat in self.last if beat.lives), default=0.0)
