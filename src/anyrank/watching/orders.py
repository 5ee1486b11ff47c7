"""What the rank that judges has all ranks do, and what they answer.

An order is one key of the store. So are the names of all ranks' answers, to which each rank adds
its own; what many ranks see alike is written once. The rank that judges reads both by as many calls
on a thousand ranks as on two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from anyrank.watching.looks import Look
from anyrank.world.store import Store

LOOK = "look"  # at itself, for two seconds
CALLS = "calls"  # of a block of a group: tell them
STACKS = "stacks"  # at the calls: tell them too
EXIT = "exit"


class Order(NamedTuple):
    """What ranks are to do at their next tick.

    Attributes:
        number: counts from 1.
        what: LOOK, CALLS, STACKS or EXIT.
        ranks: that are to do it; none for all.
        block: of CALLS and STACKS, a group and the number of a block.
    """

    number: int
    what: str
    ranks: Sequence[int] = ()
    block: Sequence[str | int] = ()


class Orders:
    """Gives orders, follows them, and reads what was answered.

    Args:
        store: of the watch.
        rank: this process's.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._newest = 0

    def give(self, what: str, ranks: Sequence[int] = (), block: Sequence[str | int] = ()) -> Order:
        """Tell ranks what to do; this one is not told."""
        order = Order(self._store.count("orders"), what, ranks, block)
        self._store.set("order", json.dumps(order))
        self._newest = order.number
        return order

    def next(self) -> Order | None:
        """An order that this rank has not had yet, if there is one for it."""
        text = self._store.get("order")
        order = Order(*json.loads(text)) if text else Order(0, "")
        if order.number <= self._newest:
            return None
        self._newest = order.number
        return order if not order.ranks or self._rank in order.ranks else None

    def answer(self, order: Order, look: Look) -> None:
        """Tell what this rank has seen."""
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
        """What ranks have answered; the store forgets it."""
        names = sorted({*answers.values()})
        keys = [f"look/{order.number}/{name}" for name in names]
        values = self._store.call(lambda store: store.multi_get(keys)) if keys else []
        texts = dict(zip(names, (value.decode() for value in values), strict=True))
        for key in (*keys, f"answers/{order.number}"):
            self._store.delete(key)
        return {rank: Look.from_json(rank, texts[name]) for rank, name in answers.items()}
