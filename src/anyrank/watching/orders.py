"""Orders from the judge to all ranks, and the answers of the ranks.

An order is one key of the store. The names of all answers are one key too, to which each rank
appends its own. Equal looks of several ranks are written once. The judge needs the same number of
calls of the store for two ranks as for a thousand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from anyrank.watching.looks import Look
from anyrank.world.store import Store

LOOK = "look"  # at itself, for two seconds
CALLS = "calls"  # report the calls in a block of a group
STACKS = "stacks"  # report these calls with their stacks
EXIT = "exit"


class Order(NamedTuple):
    """An instruction that ranks carry out at their next tick.

    Attributes:
        number: number of the order, counted from 1.
        what: LOOK, CALLS, STACKS or EXIT.
        ranks: the ranks that carry it out; empty for all ranks.
        block: for CALLS and STACKS, a group and the number of a block.
    """

    number: int
    what: str
    ranks: Sequence[int] = ()
    block: Sequence[str | int] = ()


class Orders:
    """The channel for orders and answers of a watch.

    Args:
        store: the store of the watch.
        rank: the rank of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._newest = 0

    def give(self, what: str, ranks: Sequence[int] = (), block: Sequence[str | int] = ()) -> Order:
        """Publish an order for other ranks, and return it."""
        order = Order(self._store.count("orders"), what, ranks, block)
        self._store.set("order", json.dumps(order))
        self._newest = order.number
        return order

    def next(self) -> Order | None:
        """Return an order for this rank that it has not read yet; None if none exists."""
        text = self._store.get("order")
        order = Order(*json.loads(text)) if text else Order(0, "")
        if order.number <= self._newest:
            return None
        self._newest = order.number
        return order if not order.ranks or self._rank in order.ranks else None

    def answer(self, order: Order, look: Look) -> None:
        """Publish the look of this rank."""
        text = look.to_json()
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        key = f"look/{order.number}/{name}"
        if not self._store.has([key]):
            self._store.set(key, text)
        line = f"{self._rank} {name}\n"
        self._store.call(lambda store: store.append(f"answers/{order.number}", line))

    def answers(self, order: Order) -> dict[int, str]:
        """Return the names of the answers so far, by rank."""
        lines = self._store.get(f"answers/{order.number}").splitlines()
        return {int(rank): name for rank, _, name in (line.partition(" ") for line in lines)}

    def take(self, order: Order, answers: dict[int, str]) -> dict[int, Look]:
        """Read the answers of ranks, and delete them from the store."""
        names = sorted({*answers.values()})
        keys = [f"look/{order.number}/{name}" for name in names]
        values = self._store.call(lambda store: store.multi_get(keys)) if keys else []
        texts = dict(zip(names, (value.decode() for value in values), strict=True))
        for key in (*keys, f"answers/{order.number}"):
            self._store.delete(key)
        return {rank: Look.from_json(rank, texts[name]) for rank, name in answers.items()}
