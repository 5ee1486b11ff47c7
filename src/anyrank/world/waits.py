"""Waits for other ranks: never silently, and never longer than the timeout.

A rank that waits for longer than a second writes into the job's store that it has arrived, and
reads from it which ranks have not; one rank looks for all. A rank that finds that the ranks cannot
continue writes the reason there; every rank raises the first reason that was written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.failures import NO_ANSWER
from anyrank.world.first_ranks import SHOWN, FirstRanks, name_ranks
from anyrank.world.store import Store, StoreLost, answer_sec

log = logging.getLogger("anyrank.world")

POLL_SEC = 1.0  # how often a waiting rank checks the others
WARN_SEC = 10.0  # until the first warning; each later one comes after twice the time
LOOKING = "looking"  # in the store, while a rank looks for the absent ranks
WAY_OUT = (
    "Every rank must make the same calls; for a call of only one process, pass "
    "process_group=anyrank.ALONE."
)


class GroupState:
    """State that the ranks of one gloo group share in the job's store.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's global rank.
        store: the group's own part of the store.

    Attributes:
        nodes: for each of `ranks`, the index of its machine, once that is known.
        hosts: for each machine, its name.
        error: text and causes of the error that ended the group, or None.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Store) -> None:
        self.ranks, self.rank, self.store = tuple(ranks), rank, store
        self.nodes: tuple[int, ...] = (0,) * len(ranks)
        self.hosts: tuple[str, ...] = ("",)
        self.error: tuple[str, dict[int, str]] | None = None

    def name_ranks(self, ranks: Sequence[int] | FirstRanks) -> str:
        """Return ranks as text, with their machines if there are several."""
        if len(self.hosts) == 1:
            return name_ranks(ranks)
        some = ranks if isinstance(ranks, FirstRanks) else FirstRanks.first_of(ranks)
        node_of = dict(zip(self.ranks, self.nodes, strict=True))
        by_node: dict[int, list[int]] = {}
        for rank in some.ranks:
            by_node.setdefault(node_of[rank], []).append(rank)
        text = ", ".join(f"{name_ranks(r)} on {self.hosts[n]}" for n, r in by_node.items())
        more = some.count - len(some.ranks)
        return f"{text} and {more:,} more" if more else text

    def arrive(self, number: int, text: str = "") -> None:
        """Write that this rank has arrived at the wait with this number, and add `text`."""
        self.store.set(arrival_key(number, self.rank), text)

    def leave(self, number: int) -> None:
        """Remove what `arrive` wrote, so that the store does not grow."""
        self.store.delete(arrival_key(number, self.rank))

    def find_absent(self, number: int, look: str) -> list[int] | None:
        """Find ranks that have not arrived at a wait, at most one more than a message names.

        The first rank that calls this looks for all ranks, because there are as many keys as ranks.

        Args:
            number: number of the wait.
            look: a name for this search, the same on every rank.

        Returns:
            The ranks; None while another rank is looking.
        """
        key = _look_key(number, look)
        own_claim = f"{LOOKING} {self.rank}"
        answer = self.store.set_first(key, own_claim)
        if answer == own_claim:
            absent = self._look_for_absent(number)
            self.store.set(key, json.dumps(absent))
            return absent
        if answer.startswith(LOOKING):
            return None
        return [rank for rank in json.loads(answer) if not self._has_arrived(number, rank)]

    def forget_look(self, number: int, look: str) -> None:
        """Remove the keys that `find_absent` wrote."""
        self.store.delete(_look_key(number, look))

    def _look_for_absent(self, number: int) -> list[int]:
        keys = [arrival_key(number, rank) for rank in self.ranks]
        return [self.ranks[index] for index in self.store.find_absent(keys, SHOWN + 1)]

    def _has_arrived(self, number: int, rank: int) -> bool:
        return self.store.has([arrival_key(number, rank)])

    def end(self, text: str, causes: Sequence[int] = (), cause: str = NO_ANSWER) -> RankError:
        """End the group; return the error for all ranks: the first one that was written.

        Args:
            text: the reason, used if no other rank has written one.
            causes: the ranks that are at fault.
            cause: what they did.
        """
        error: tuple[str, dict[str, str]] = text, dict.fromkeys(map(str, causes), cause)
        with contextlib.suppress(StoreLost):
            error = json.loads(self.store.set_first("end", json.dumps(error)))
        self.error = error[0], {int(rank): text for rank, text in error[1].items()}
        return self.as_error()

    def has_ended(self) -> bool:
        """Return whether a rank has ended the group."""
        if self.error is None and self.store.has(["end"]):
            self.end("")
        return self.error is not None

    @property
    def has_dead_rank(self) -> bool:
        """Return whether the group ended because a rank died."""
        return self.error is not None and NO_ANSWER in self.error[1].values()

    def as_error(self) -> RankError:
        """Return the error that ended the group."""
        assert self.error is not None
        text, causes = self.error
        return RankError(text, causes={**causes})

    def end_for_death(self, dead: Sequence[int]) -> RankError:
        """End the group, as `end` does, because the connections to some ranks are closed."""
        rank_nodes = zip(self.ranks, self.nodes, strict=True)
        alive = {node for rank, node in rank_nodes if rank not in dead}
        dead_hosts = [host for node, host in enumerate(self.hosts) if node not in alive]
        if not dead:
            text = "the connection between the ranks broke, but no rank has closed it"
        elif dead_hosts:
            verb = "is" if len(dead_hosts) == 1 else "are"
            text = f"{self.name_ranks(dead)} died or stopped responding: {', '.join(dead_hosts)} "
            text += f"{verb} down or unreachable"
        else:
            logs = "its log" if len(dead) == 1 else "their logs"
            text = f"{self.name_ranks(dead)} died or stopped responding; see {logs} for the cause"
        return self.end(text, dead)


class Wait:
    """One wait of this rank for other ranks.

    Attributes:
        spent_sec: seconds that the main thread of this process has spent in waits.
        current: the newest wait of the main thread that took a while; it may have ended.

    Args:
        state: state of the group.
        what: what this rank waits for, for messages.
        find_closed: returns the ranks whose connections are closed.
        number: number of the wait, if all ranks take part; None for a wait for `peers`.
        peers: the ranks that this one waits for, if `number` is None.
    """

    spent_sec = 0.0
    current: ClassVar[Wait | None] = None

    def __init__(
        self,
        state: GroupState,
        what: str,
        find_closed: Callable[[], list[int]],
        number: int | None,
        peers: Sequence[int] = (),
    ) -> None:
        self.state, self.what, self.find_closed = state, what, find_closed
        self.number, self.peers = number, peers
        self.start_sec = time.monotonic()
        self.warn_sec, self.probe_sec = WARN_SEC, POLL_SEC
        self.has_arrived = False
        self.looks: list[str] = []  # names of the searches that this rank has requested
        self.timeout_sec = TIMEOUT_SEC.get()
        self.poll_sec = min(POLL_SEC, self.timeout_sec / 4)

    def poll(self) -> None:
        """Check whether the wait can still end, and warn about missing ranks.

        Raises:
            RankError: the wait cannot end, or has lasted ANYRANK_TIMEOUT_SEC.
        """
        seconds = time.monotonic() - self.start_sec
        if threading.current_thread() is threading.main_thread():
            Wait.current = self
        with contextlib.suppress(StoreLost):
            if self.state.has_ended():
                raise self.state.as_error()
            if self.number is not None and not self.has_arrived:
                self.state.arrive(self.number)
                self.has_arrived = True
        if seconds > self.probe_sec:  # rarer and rarer: each probe leaks some memory in gloo
            self.probe_sec = 2 * seconds
            if dead := self.find_closed():
                raise self.state.end_for_death(dead)
        if seconds > self.timeout_sec:
            absent = self._find_absent("last")
            if absent is not None or seconds > self.timeout_sec + answer_sec():
                raise self._as_timeout(absent or [])
        elif seconds > self.warn_sec:
            absent = self._find_absent(f"{self.warn_sec:g}")
            if absent is not None:
                self.warn_sec *= 2
                self._log_warning(absent, round(seconds))

    def finish(self) -> None:
        """Clean up after the wait, whether or not it succeeded."""
        if threading.current_thread() is threading.main_thread():
            Wait.spent_sec += time.monotonic() - self.start_sec
            Wait.current = None
        if self.number is not None:
            with contextlib.suppress(StoreLost):
                if self.has_arrived:
                    self.state.leave(self.number)
                for look in self.looks:
                    self.state.forget_look(self.number, look)

    def _find_absent(self, look: str) -> list[int] | None:
        """Find the ranks that this one waits for: [] if unknown, None while another rank looks."""
        if self.number is None:
            return [*self.peers]
        with contextlib.suppress(StoreLost):
            if look not in self.looks:
                self.looks.append(look)
            return self.state.find_absent(self.number, look)
        return []

    def _log_warning(self, absent: Sequence[int], seconds: int) -> None:
        state = self.state
        if absent:
            reason = f" for {state.name_ranks(absent)}. {WAY_OUT}"
        elif state.store.lost:
            reason = "; the missing ranks are unknown because the store does not answer"
        else:
            reason = "; the missing ranks have just arrived"
        log.warning("%s: rank %d has waited %d s%s", self.what, state.rank, seconds, reason)

    def _as_timeout(self, absent: Sequence[int]) -> RankError:
        """Make the error for a wait that lasted ANYRANK_TIMEOUT_SEC."""
        state, deadline = self.state, f"within {self.timeout_sec:.0f} s"
        if absent:
            text = f"{state.name_ranks(absent)} did not reach {self.what!r} {deadline}. {WAY_OUT}"
            return state.end(text, absent, "did not arrive")
        # If the network is cut, no rank knows which others have arrived.
        others = [rank for rank in state.ranks if rank != state.rank]
        own_node = state.nodes[state.ranks.index(state.rank)]
        remote = [r for r, node in zip(state.ranks, state.nodes, strict=True) if node != own_node]
        text = f"{state.name_ranks(remote or others)} did not respond {deadline} during "
        text += f"{self.what!r}: a process or the network hangs or is down"
        return state.end(text, (remote or others)[:SHOWN])


def arrival_key(number: int, rank: int) -> str:
    """Return the key of the store that says that a rank has arrived at a wait."""
    return f"came/{number}/{rank}"


def _look_key(number: int, look: str) -> str:
    return f"absent/{number}/{look}"
