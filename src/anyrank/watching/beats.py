"""The ranks' signs of life, and the one rank that judges a standstill.

Each rank writes its own sign. Only the judging rank reads all of them, by one call of the store;
the others read its sign alone. So a stall costs a rank two keys a second, on any number of ranks,
and a rank that was only late is not judged by a second judge.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from anyrank.world.store import Store

SILENT_SEC = 5.0  # without a new sign of life, after which a rank is inspected from outside
REPLACED_SEC = 10.0  # without a sign of the judge, after which another rank judges
READINGS = 4  # of one sign before it counts as old: a reader without a core has read it only once
LEFT = "left"  # the last sign of life of a rank whose watch has ended
ABSENT = "absent"  # in place of the sign of a rank that has never given one


class Beat(NamedTuple):
    """A rank's last sign of life.

    Attributes:
        text: as in the store: steps, seconds since the last, and a part that makes it new; LEFT;
            ABSENT; or "" if nobody has looked.
        time: time of its first reading.
        readings: number of readings.
    """

    text: str = ""
    time: float = 0.0
    readings: int = 0

    def read(self, text: str) -> Beat:
        """Read this sign once more, or a new one."""
        if text == self.text:
            return self._replace(readings=self.readings + 1)
        return Beat(text, time.monotonic(), 1)

    @property
    def watches(self) -> bool:
        """Return whether the rank has given a sign, and has not ended its watch."""
        return self.text not in ("", LEFT, ABSENT)

    def is_old(self, seconds: float) -> bool:
        """Return whether there was no other sign for so long."""
        return time.monotonic() - self.time > seconds and self.readings >= READINGS

    @property
    def lives(self) -> bool:
        """Return whether the rank watches, and has given a sign recently."""
        return self.watches and not self.is_old(SILENT_SEC)

    @property
    def steps(self) -> int:
        """The number of steps that the rank has made."""
        return int(self.text.split()[0]) if self.watches else 0

    @property
    def idle_sec(self) -> float:
        """Seconds since the last step of a living rank."""
        return float(self.text.split()[1]) + time.monotonic() - self.time


class Beats:
    """The signs of life of all ranks, as this rank gives and reads them.

    Rank 0 judges. If it gives no sign for REPLACED_SEC, the lowest rank that does replaces it for
    good: the store records who was first.

    Args:
        store: the watch's store.
        rank, size: this rank and the number of ranks of the job.

    Attributes:
        last: sign of each rank, as last read by `listen`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._keys = [f"beat/{rank}" for rank in range(size)]
        self.last = [Beat()] * size
        self._term, self._judge, self._judges_beat = 0, 0, Beat("unread")

    def give(self, steps: int, idle_sec: float) -> None:
        """Give a sign of life."""
        self._store.set(self._keys[self._rank], f"{steps} {idle_sec:.3f} {time.monotonic()}")

    def leave(self) -> None:
        """Give the last sign of life."""
        self._store.set(self._keys[self._rank], LEFT)

    def listen(self) -> None:
        """Read all ranks' signs, by a single call once each rank has a key."""
        if not self._store.has(self._keys):
            for rank in self._store.find_absent(self._keys, self._size):
                self._store.set_first(self._keys[rank], ABSENT)
        values = self._store.call(lambda store: store.multi_get(self._keys))
        self.last = [
            beat.read(value.decode()) for beat, value in zip(self.last, values, strict=True)
        ]

    def find_judge(self) -> bool:
        """Find out which rank judges; return whether it is this one."""
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
        return False  # the next call reads who was first

    def steps(self) -> int:
        """The steps of all ranks together."""
        return sum(beat.steps for beat in self.last)

    def idle_sec(self) -> float:
        """Seconds since the last step of any rank."""
        return min((beat.idle_sec for beat in self.last if beat.lives), default=0.0)
