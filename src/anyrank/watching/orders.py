"""Orders from the judging rank to all ranks, and their answers.

An order is one key of the store. The names of all ranks' answers are one key too, to which each
rank adds its own; equal looks of many ranks are written once. The judging rank reads both with as
many calls on a thousand ranks as on two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from anyrank.watching.looks import Look
from anyrank.world.store import Store

LOOK = "look"  # at itself, for two seconds
CALLS = "calls"  # report the calls of a block of a group
STACKS = "stacks"  # report the stacks of these calls too
EXIT = "exit"


class Order(NamedTuple):
    """The work for ranks at their next tick.

    Attributes:
        number: counts from 1.
        what: LOOK, CALLS, STACKS or EXIT.
        ranks: the ranks that carry it out; empty for all.
        block: for CALLS and STACKS, a group and the number of a block.
    """

    number: int
    what: str
    ranks: Sequence[int] = ()
    block: Sequence[str | int] = ()


class Orders:
    """Gives orders, follows them, and reads the answers.

    Args:
        store: the watch's store.
        rank: this process's rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._newest = 0

    def give(self, what: str, ranks: Sequence[int] = (), block: Sequence[str | int] = ()) -> Order:
        """Give ranks an order; this rank does not get it."""
        order = Order(self._store.count("orders"), what, ranks, block)
        self._store.set("order", json.dumps(order))
        self._newest = order.number
        return order

    def next(self) -> Order | None:
        """The next order for this rank that it has not had yet; None if there is none."""
        text = self._store.get("order")
        order = Order(*json.loads(text)) if text else Order(0, "")
        if order.number <= self._newest:
            return None
        self._newest = order.number
        return order if not order.ranks or self._rank in order.ranks else None

    def answer(self, order: Order, look: Look) -> None:
        """Publish this rank's look."""
        text = look.to_json()
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        key = f"look/{order.number}/{name}"
        if not self._store.has([key]):
            self._store.set(key, text)
        line = f"{self._rank} {name}\n"
        self._store.call(lambda store: store.append(f"answers/{order.number}", line))

    def answers(self, order: Order) -> dict[int, str]:
        """Rank -> the name of its answer."""
        lines = self._store.get(f"answers/{order.number}").splitlines()
        return {int(rank): name for rank, _, name in (line.partition(" ") for line in lines)}

    def take(self, order: Order, answers: dict[int, str]) -> dict[int, Look]:
        """Read the ranks' answers; the store forgets them."""
        names = sorted({*answers.values()})
        keys = [f"look/{order.number}/{name}" for name in names]
        values = self._store.call(lambda store: store.multi_get(keys)) if keys else []
        texts = dict(zip(names, (value.decode() for value in values), strict=True))
        for key in (*keys, f"answers/{order.number}"):
            self._store.delete(key)
        return {rank: Look.from_json(rank, texts[name]) for rank, name in answers.items()}
