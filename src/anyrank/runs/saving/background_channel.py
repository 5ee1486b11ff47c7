"""Connections for another thread, so that its messages do not mix with the training's."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Generator
from contextlib import contextmanager

from anyrank.world.ranks import Ranks

_used: set[tuple[tuple[int, ...], int]] = set()  # ranks, and an open channel between them


@contextmanager
def open_channel(ranks: Ranks, call: str) -> Generator[Ranks, None, None]:
    """Open connections between the same ranks for another thread. Collective."""
    own_used = {channel for members, channel in _used if members == ranks.ranks}
    used = ranks.reduce(f"opening a channel for {call}", own_used, operator.or_)
    channel = next(n for n in itertools.count(1) if n not in used)
    key = ranks.ranks, channel
    _used.add(key)
    try:
        yield Ranks(ranks.ranks, ranks.rank, call, channel)
    finally:
        _used.discard(key)
