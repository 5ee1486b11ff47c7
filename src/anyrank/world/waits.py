"""Waiting for other ranks: never in silence, and never longer than the timeout.

Who waits for longer than a second notes in the job's store that it has come, and reads there who
has not. Who finds that the ranks cannot go on together writes there why: what the first one writes,
all of them raise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.group import SHOWN, named
from anyrank.world.store import Store, StoreLost

log = logging.getLogger("anyrank.world")

LOOK_SEC = 1.0  # how often a rank that waits looks around
WARN_SEC = 10.0  # of waiting in silence; then again at twice the time, and so on
NO_ANSWER = "no answer"  # what is said of a rank that is dead, as far as that is known
WAY_OUT = "make the same calls on all ranks, or pass process_group=anyrank.ALONE"


class Notes:
    """What the ranks of one gloo group note for each other in the job's store.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's own.
        store: the group's own part of the store.

    Attributes:
        nodes: for each of `ranks`, which machine it is on, once that is known.
        hosts: for each machine, its name.
        error: text and causes of the error that ended the group, once there is one.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Store) -> None:
        self.ranks, self.rank, self.store = tuple(ranks), rank, store
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = ("",)
        self.error: tuple[str, dict[int, str]] | None = None

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the ranks in words; with their machines, where there are several."""
        if len(self.hosts) == 1:
            return named(ranks)
        node_of = dict(zip(self.ranks, self.nodes, strict=True))
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(node_of[rank], []).append(rank)
        return ", ".join(f"{named(there)} on {self.hosts[n]}" for n, there in by_node.items())

    def arrive(self, number: int) -> None:
        """This rank has come to the wait of this number."""
        self.store.set(_came(number, self.rank), "")

    def leave(self, number: int) -> None:
        """The wait is over: its note goes, so that the store does not grow."""
        self.store.delete(_came(number, self.rank))

    def absent(self, number: int) -> list[int]:
        """Ranks that have not come to a wait, some of them where they are many."""
        keys = [_came(number, rank) for rank in self.ranks]
        return [self.ranks[index] for index in self.store.absent(keys, SHOWN + 1)]

    def wait_for_all(self, number: int, seconds: float) -> bool:
        """Whether all ranks come to the wait within the given seconds."""
        return self.store.wait([_came(number, rank) for rank in self.ranks], seconds)

    def end(self, text: str, causes: Sequence[int] = (), cause: str = NO_ANSWER) -> RankError:
        """The error that ends the group, on all ranks: the first one that was written.

        Args:
            text: says why, if no other rank has said so.
            causes: the ranks at fault.
            cause: what they did.
        """
        said: tuple[str, dict[str, str]] = text, dict.fromkeys(map(str, causes), cause)
        with contextlib.suppress(StoreLost):
            said = json.loads(self.store.set_first("end", json.dumps(said)))
        self.error = said[0], {int(rank): each for rank, each in said[1].items()}
        return self.as_error()

    def ended(self) -> bool:
        """Whether some rank has ended the group."""
        if self.error is None and self.store.has(["end"]):
            self.end("")
        return self.error is not None

    @property
    def is_death(self) -> bool:
        """Whether the group ended because a rank did."""
        return self.error is not None and NO_ANSWER in self.error[1].values()

    def as_error(self) -> RankError:
        """What ended the group."""
        assert self.error is not None
        text, causes = self.error
        return RankError(text, causes={**causes})

    def end_by_death(self, dead: Sequence[int]) -> RankError:
        """As `end`, of ranks whose connections are closed."""
        at = zip(self.ranks, self.nodes, strict=True)
        alive = {node for rank, node in at if rank not in dead}
        gone = [host for node, host in enumerate(self.hosts) if node not in alive]
        if not dead:
            text = "the connection between the ranks broke, and no rank has closed it"
        elif gone:
            text = f"{self.named(dead)} died or does not answer: {', '.join(gone)} or the network "
            text += "to it is gone"
        else:
            text = f"{self.named(dead)} died or does not answer: look at its log for the cause"
        return self.end(text, dead)


class Wait:
    """One wait of this rank for others.

    Attributes:
        spent_sec: seconds that the main thread of this process has waited so far.

    Args:
        notes: of the group.
        what: is waited for, for messages.
        closed: ranks whose connections are known to be closed.
        number: of the wait, the same on all ranks, which all come to it; or None.
        peers: the ranks that are waited for, where there is no number.
    """

    spent_sec = 0.0

    def __init__(
        self,
        notes: Notes,
        what: str,
        closed: Callable[[], list[int]],
        number: int | None,
        peers: Sequence[int] = (),
    ) -> None:
        self.notes, self.what, self.closed = notes, what, closed
        self.number, self.peers = number, peers
        self.since = time.monotonic()
        self.warn_sec, self.probe_sec = WARN_SEC, LOOK_SEC
        self.is_noted = False
        self.timeout_sec = TIMEOUT_SEC.get()
        self.look_sec = min(LOOK_SEC, self.timeout_sec / 4)

    def look(self) -> None:
        """Look around while the wait goes on. Warns by name.

        Raises:
            RankError: it goes on in vain.
        """
        seconds = time.monotonic() - self.since
        with contextlib.suppress(StoreLost):
            if self.notes.ended():
                raise self.notes.as_error()
            if self.number is not None and not self.is_noted:
                self.notes.arrive(self.number)
                self.is_noted = True
        if seconds > self.probe_sec:  # each look at a connection leaves a little memory there
            self.probe_sec = 2 * seconds
            if dead := self.closed():
                raise self.notes.end_by_death(dead)
        if seconds > self.timeout_sec:
            raise self._timed_out()
        if seconds > self.warn_sec:
            self.warn_sec *= 2
            self._warn(round(seconds))

    def over(self) -> None:
        """The wait has ended, well or not."""
        if threading.current_thread() is threading.main_thread():
            Wait.spent_sec += time.monotonic() - self.since
        if self.is_noted and self.number is not None:
            with contextlib.suppress(StoreLost):
                self.notes.leave(self.number)

    def _absent(self) -> list[int]:
        """Who is waited for, as far as that is known."""
        if self.number is None:
            return [*self.peers]
        with contextlib.suppress(StoreLost):
            return self.notes.absent(self.number)
        return []

    def _warn(self, seconds: int) -> None:
        absent, rank = self._absent(), self.notes.rank
        who = f" for {self.notes.named(absent)}: {WAY_OUT}" if absent else ", and who is missing "
        who += "" if absent else "is not known" if self.notes.store.lost else "has just come"
        log.warning("%s: rank %d has waited %d s%s", self.what, rank, seconds, who)

    def _timed_out(self) -> RankError:
        """The error of a rank that has waited for long enough."""
        notes, within = self.notes, f"within {self.timeout_sec:.0f} s"
        if absent := self._absent():
            text = f"{notes.named(absent)} did not come to {self.what!r} {within}: {WAY_OUT}"
            return notes.end(text, absent, "did not come")
        # Over a network that is cut, nobody knows who has come.
        others = [rank for rank in notes.ranks if rank != notes.rank]
        own = notes.nodes[notes.ranks.index(notes.rank)]
        far = [r for r, node in zip(notes.ranks, notes.nodes, strict=True) if node != own]
        text = f"no answer from {notes.named(far or others)} {within} in {self.what!r}: "
        return notes.end(f"{text}the network or a process is stuck or gone", far or others)


def _came(number: int, rank: int) -> str:
    return f"came/{number}/{rank}"
