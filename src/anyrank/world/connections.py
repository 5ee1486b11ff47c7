"""What connects the ranks of a group: gloo, the store, and what is known of their machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.group import Group, default_store, members, named
from anyrank.world.meeting import Meeting, Met
from anyrank.world.store import Store, StoreLost, is_here
from anyrank.world.watch import TICK_SEC

ROLL_CALL_SEC = 3 * TICK_SEC  # how long survivors wait for one another before they name the dead
CONNECT_SEC = 120.0  # for connections between ranks that have just met


@dataclass(frozen=True)
class Connections:
    """The connections of a group.

    Attributes:
        ranks: the global ranks, in the group's order.
        group: gloo's connections, which count ranks by their position.
        store: the group's own part of the store.
        met: the group's name, and the ranks' machines.
    """

    ranks: tuple[int, ...]
    group: Any
    store: Store
    met: Met

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the ranks in words; with their machines, where there are several."""
        if len(self.met.hosts) == 1:
            return named(ranks)
        node_of = dict(zip(self.ranks, self.met.nodes, strict=True))
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(node_of[rank], []).append(rank)
        return ", ".join(f"{named(there)} on {self.met.hosts[n]}" for n, there in by_node.items())

    def roll_call(self, rank: int, flag: str, number: int, what: str) -> RankError:
        """The error that names the ranks that no longer answer, for those that do.

        Args:
            rank: this process's own.
            flag: the key that makes busy ranks come.
            number: of the wait that broke off.
            what: was waited for.
        """
        try:
            dead, late = self._call_roll(rank, flag, number)
        except StoreLost as error:
            return RankError(self._without_store(rank, str(error)))
        alive = {node for r, node in zip(self.ranks, self.met.nodes, strict=True) if r not in dead}
        gone = [host for node, host in enumerate(self.met.hosts) if node not in alive]
        if dead and gone:
            text = f"{self.named(dead)} died or does not answer: {', '.join(gone)} or the network "
            text += "to it is gone"
        elif dead:
            text = f"{self.named(dead)} died or does not answer: look at its log for the cause"
        elif late:
            text = f"{self.named(late)} did not come to {what!r}, though alive"
        else:
            text = "the connection between the ranks broke although all of them are alive"
        causes = dict.fromkeys(dead or late, "no answer")
        return RankError(text, causes=causes)  # chained to gloo's own error, which differs by rank

    def _call_roll(self, rank: int, flag: str, number: int) -> tuple[list[int], list[int]]:
        """Ranks without a sign of life, and ranks that have not come to this agreement."""
        store, waits = self.store, f"waits/{number}"
        for key in (flag, "roll call", f"alive/{rank}", f"here/{rank}"):
            store.set(key, seconds=ROLL_CALL_SEC)
        end = time.monotonic() + ROLL_CALL_SEC
        dead = late = list(self.ranks)
        while (dead or late) and time.monotonic() < end:
            dead = [r for r in dead if not store.has([f"alive/{r}"], ROLL_CALL_SEC)]
            late = [r for r in late if not store.has([f"{waits}/{r}"], ROLL_CALL_SEC)]
            late = [r for r in late if not store.has([f"here/{r}"], ROLL_CALL_SEC)]
            time.sleep(0.05)
        return dead, late

    def _without_store(self, rank: int, text: str) -> str:
        """What the loss of the store means: the death of its process, or of its machine."""
        own, at = self.met.nodes[self.ranks.index(rank)], self.met.store_node
        if at is None or at == own:
            return f"{text}: the process that hosts it died"
        places = zip(self.ranks, self.met.nodes, strict=True)
        there = named([r for r, node in places if node == at])
        host = self.met.hosts[at]
        return f"{text}: {host}, which hosts it and {there}, or the network to it is gone"


@contextmanager
def declining(process_group: Group, call: str) -> Generator[None, None, None]:
    """Around what a rank does by itself before ranks meet. When it raises, ranks that wait for this
    one, or come to wait, learn why within seconds.

    Args:
        process_group: of the call; its ranks and all ranks are told.
        call: what fails here: "Checkpoints()".
    """
    try:
        yield
    except Exception as error:
        for group in dict.fromkeys((process_group, None)):
            with contextlib.suppress(Exception):  # a wrong group, say; the cause is what counts
                _leave(group, call, error)
        raise


def _leave(process_group: Group, call: str, error: Exception) -> None:
    ranks, rank = members(process_group)
    if len(ranks) == 1:
        return
    lobby = Store(default_store(), "anyrank")
    try:
        Meeting(lobby, ranks, rank, call, TIMEOUT_SEC.get(), False).leave(error)
    finally:
        lobby.close()


def connect_ranks(ranks: Sequence[int], rank: int, call: str, about: str = "") -> Connections:
    """Meet the other ranks and connect to them. All of `ranks`.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's own.
        call: what the ranks call.
        about: see `Meeting`.

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC, or some called something else.
    """
    seconds, shared = TIMEOUT_SEC.get(), default_store()
    lobby = Store(shared, "anyrank")
    try:
        met = Meeting(lobby, ranks, rank, call, seconds, is_here(shared), about).hold()
    except StoreLost as error:
        raise RankError(
            f"{call}: {error}: its process or its machine is gone, or the network to it"
        ) from error
    finally:
        lobby.close()
    store = Store(shared, f"anyrank/{met.name}")
    limit = min(seconds, CONNECT_SEC)

    def connect(inner: Any) -> Any:
        # Not new_group(), whose names and keys the user's groups share.
        group = dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
            inner, ranks.index(rank), len(ranks), timedelta(seconds=limit)
        )
        group.set_timeout(timedelta(seconds=seconds))
        return group

    try:
        return Connections(tuple(ranks), store.call(connect, limit + 5), store, met)
    except StoreLost as error:
        store.close()
        raise RankError(
            f"{call}: rank {rank} could not connect to the ranks on {', '.join(met.hosts)} within "
            f"{limit:.0f} s: {error}"
        ) from error
