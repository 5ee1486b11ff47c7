"""How the ranks of a call find each other: a new name that all of them share, within a deadline.

Each rank posts under a key of these ranks; the first one answers when it has seen all posts.
Nothing is counted, so nothing drifts: ranks may be in other groups, and an earlier call may have
failed on some of them.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyrank import faults
from anyrank.errors import RankError
from anyrank.world.crossed import Board, is_main_thread
from anyrank.world.device import boot_id
from anyrank.world.group import SHOWN, key_of, named
from anyrank.world.processes import has_ended, is_alive, own_process, sibling_has_ended
from anyrank.world.store import Store, StoreLost

log = logging.getLogger("anyrank.world")

WARN_SEC = 10.0  # of waiting in silence; then again at twice the time, and so on
BEAT_SEC = 1.0  # how often a waiting rank gives a sign of life
LIFE_SEC = 10.0  # without one, a rank that waited is dead
LEFT_SEC = 5.0  # after which a rank that had left before this meeting does not come any more
POLL_SEC = 0.05  # between looks at the store; the first ones follow each other faster
WAY_OUT = "call it on all ranks, or pass process_group=anyrank.ALONE"


@dataclass(frozen=True)
class Met:
    """What the ranks of a group know of each other before they are connected.

    Attributes:
        name: of the group; no other group has it.
        nodes: for each rank, in the group's order, which machine it is on; they count from 0.
        hosts: for each machine, its name.
        store_node: the machine that hosts the store, where that is known.
    """

    name: str
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    store_node: int | None


class Meeting:
    """One rank's way into a group.

    Args:
        store: shared by all processes of the job.
        ranks: global ranks, the same sequence on each.
        rank: this process's own.
        call: what the ranks call, for messages: "load()".
        seconds: until a rank that waits gives up.
        hosts_store: whether this machine hosts the store.
        about: what the call is about, which tells it from one that a rank makes by itself.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        call: str,
        seconds: float,
        hosts_store: bool,
        about: str = "",
    ) -> None:
        self.about = about
        self.store = store
        self.ranks = ranks
        self.rank = rank
        self.call = call
        self.seconds = seconds
        self.machine = [socket.gethostname(), boot_id()]
        self.hosts_store = hosts_store
        self.start = time.monotonic()
        self.warned_sec = WARN_SEC / 2
        self.beats = 0
        self.beaten = self.start
        self.seen: dict[int, tuple[str, float]] = {}  # position -> its last post, and since when
        self.nonce = uuid.uuid4().hex
        key = key_of(ranks)
        self.posts = [f"post/{key}/{index}" for index in range(len(ranks))]
        self.board: Board | None = None

    def hold(self) -> Met:
        """Find the others. All ranks.

        Raises:
            RankError: a rank has not come, has died or has left, or calls something else.
        """
        index = self.ranks.index(self.rank)
        process = own_process() | {"host": self.machine[0]}
        self.store.set(f"process/{self.rank}", json.dumps(process))  # for those who miss it later
        self.post()
        try:
            met = self.lead() if index == 0 else self.follow()
            self.confirm(met.name)
        except BaseException as error:
            self.leave(error)
            raise
        finally:
            if self.board is not None:
                self.board.close()
        return met

    def post(self) -> None:
        """Write this rank's sign of life."""
        self.beats += 1
        post = {
            "nonce": self.nonce,
            "call": self.call,
            "about": self.about,
            "machine": self.machine,
            "store": self.hosts_store,
            "beat": self.beats,
        }
        self.store.set(self.posts[self.ranks.index(self.rank)], json.dumps(post))

    def leave(self, error: BaseException) -> None:
        """Tell those that still wait why this rank no longer does."""
        left = f"{type(error).__name__}: {error}"[:200]
        try:
            self.store.set(
                self.posts[self.ranks.index(self.rank)],
                json.dumps({"left": left, "call": self.call, "beat": time.time()}),
                seconds=1.0,
            )
        except StoreLost:
            log.debug("the other ranks do not know that rank %d left", self.rank)

    def lead(self) -> Met:
        """The first rank's part: see all, compare the calls, and answer."""
        posts: list[dict[str, Any]] = []

        def all_wait() -> bool:
            """Whether all ranks are here; one that left an earlier meeting may still come."""
            if self.store.has(self.posts):
                posts[:] = [json.loads(self.store.get(key) or '{"left": ""}') for key in self.posts]
            return bool(posts) and not any("left" in post for post in posts)

        self.wait(all_wait, self.watch_all)
        calls: dict[str, list[int]] = {}
        for rank, post in zip(self.ranks, posts, strict=True):
            calls.setdefault(post["call"], []).append(rank)
        if len(calls) > 1:
            words = ", ".join(f"{named(ranks)} {call}" for call, ranks in calls.items())
            problem = f"ranks make different calls at the same place: {words}"
            self.answer(posts, {"problem": problem})
            raise RankError(problem)
        each = [tuple(post["machine"]) for post in posts]
        machines = list(dict.fromkeys(each))
        met = Met(
            name=uuid.uuid4().hex,
            nodes=tuple(machines.index(machine) for machine in each),
            hosts=tuple(host for host, _ in machines),
            store_node=next(
                (machines.index(m) for m, post in zip(each, posts, strict=True) if post["store"]),
                None,
            ),
        )
        self.answer(posts, asdict(met))
        return met

    def answer(self, posts: Sequence[dict[str, Any]], answer: dict[str, Any]) -> None:
        """Tell all ranks that wait how it ended."""
        for post in posts:
            if "nonce" in post and post["nonce"] != self.nonce:
                self.store.set(f"answer/{post['nonce']}", json.dumps(answer))

    def follow(self) -> Met:
        """The other ranks' part."""
        key = f"answer/{self.nonce}"
        self.wait(lambda: self.store.has([key]), self.watch_first)
        answer = json.loads(self.store.take(key))
        if "problem" in answer:
            raise RankError(answer["problem"])
        nodes, hosts = tuple(answer["nodes"]), tuple(answer["hosts"])
        return Met(answer["name"], nodes, hosts, answer["store_node"])

    def confirm(self, name: str) -> None:
        """See that all ranks that were answered are still alive. All ranks."""
        self.store.delete(self.posts[self.ranks.index(self.rank)])
        if self.store.add(f"{name}/here", 1) == len(self.ranks):
            self.store.set(f"{name}/complete")
        start, pause = time.monotonic(), 0.0005
        while not self.store.has([f"{name}/complete"]):
            waited = time.monotonic() - start
            if waited > min(LIFE_SEC, self.seconds):
                gone = [r for r, k in zip(self.ranks, self.posts, strict=True) if self.store.get(k)]
                if waited > self.seconds or not all(map(self.is_alive, gone or self.ranks)):
                    who = self.named(gone) if gone else "a rank"
                    raise RankError(
                        f"{who} died while the ranks met in {self.call}: look at its log for the "
                        "cause",
                        causes=dict.fromkeys(gone, "no answer"),
                    )
            time.sleep(pause)
            pause = min(POLL_SEC, pause * 2)

    def wait(self, is_over: Callable[[], bool], watch: Callable[[], None]) -> None:
        """Poll until it is over; meanwhile give signs of life, watch the others', and warn."""
        pause = 0.0005
        while not is_over():
            faults.point("ranks.meet")
            now = time.monotonic()
            if now - self.start > self.seconds:
                raise self.timed_out()
            if now - self.beaten > BEAT_SEC:
                self.beaten = now
                self.post()
                watch()
                if now - self.start > WARN_SEC and is_main_thread():
                    self.look_across()
            if now - self.start > 2 * self.warned_sec:
                self.warned_sec *= 2
                self.warn(round(now - self.start))
            time.sleep(pause)
            pause = min(POLL_SEC, pause * 2)

    def look_across(self) -> None:
        """Raise when one that this rank waits for is waiting for it, in another call."""
        if self.board is None:
            self.board = Board(self.store, self.rank, self.nonce, self.call, 1)
        crossed = self.board.look(self.missing())
        if crossed:
            raise RankError(crossed)

    def watch_all(self) -> None:
        """Notice a rank that is gone. The first rank; it lets the others know."""
        try:
            for index in range(1, len(self.ranks)):
                self.watch(index)
        except RankError as error:
            posts = [json.loads(text) for text, _ in self.seen.values()]
            self.answer(posts, {"problem": str(error)})
            raise

    def watch_first(self) -> None:
        """Notice that the first rank is gone."""
        self.watch(0)

    def watch(self, index: int) -> None:
        """Raise when a rank has ended before it came, or waited here and has left, or gives no more
        signs of life.
        """
        text, now = self.store.get(self.posts[index]), time.monotonic()
        away = not text or "left" in json.loads(text)
        if away and self.about and self.store.get(f"alone/{self.ranks[index]}") == self.about:
            raise RankError(
                f"rank {self.ranks[index]} called {self.about} by itself, and not with the others: "
                "give all ranks the same arguments",
                causes={self.ranks[index]: "it called it by itself"},
            )
        if not text and self.has_ended(self.ranks[index]):
            raise RankError(
                f"rank {self.ranks[index]} has ended, and never came to {self.call}: look at its "
                "log for the cause",
                causes={self.ranks[index]: "it has ended"},
            )
        before, since = self.seen.get(index, ("", now))
        if text != before:
            self.seen[index] = (text, now)
        post = json.loads(text or "{}")
        # A post of an earlier meeting may stand there until its rank comes.
        if "left" in post and ((before and before != text) or now - since > LEFT_SEC):
            raise RankError(
                f"rank {self.ranks[index]} has left {post['call']}: {post['left']}",
                causes={self.ranks[index]: post["left"]},
            )
        is_silent = post and "left" not in post and text == before and now - since > LIFE_SEC
        if is_silent and not self.is_alive(self.ranks[index]):
            host = json.loads(text)["machine"][0]
            raise RankError(
                f"rank {self.ranks[index]} on {host} died while it waited for others in "
                f"{self.call}: look at its log for the cause",
                causes={self.ranks[index]: "no answer"},
            )

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended; False where that cannot be seen from here."""
        known = self.store.get(f"process/{rank}")  # of a rank that has met others before
        return has_ended(json.loads(known)) if known else sibling_has_ended(rank)

    def is_alive(self, rank: int) -> bool:
        """Whether a rank's process runs, however slowly; False where that cannot be seen here."""
        known = self.store.get(f"process/{rank}")
        return bool(known) and is_alive(json.loads(known))

    def missing(self) -> list[int]:
        """Ranks that have not posted, some of them where they are many."""
        return [self.ranks[index] for index in self.store.absent(self.posts, SHOWN + 1)]

    def named(self, missing: Sequence[int]) -> str:
        """Missing ranks in words, with the machines of those that have met others before."""
        found = [self.store.get(f"process/{rank}") for rank in missing[:SHOWN]]
        hosts = {json.loads(text)["host"] for text in found if text}
        known = sorted(hosts - {self.machine[0]})
        return named(missing) + (f" on {', '.join(known)}" if known else "")

    def warn(self, seconds: int) -> None:
        """Say whom this rank waits for."""
        missing = self.missing()
        if missing:
            log.warning(
                "%s on rank %d waits for %s, which %s not called it for %d s: %s",
                self.call,
                self.rank,
                self.named(missing),
                "have" if len(missing) > 1 else "has",
                seconds,
                WAY_OUT,
            )

    def timed_out(self) -> RankError:
        """The error of a rank that has waited long enough."""
        missing = self.missing()
        absent = f"{self.named(missing)} did not come: " if missing else ""
        return RankError(
            f"not all of ranks {list(self.ranks)} called {self.call} within {self.seconds:.0f} s: "
            f"{absent}{WAY_OUT}",
            causes=dict.fromkeys(missing, "did not come"),
        )
