"""What a rank of a test is told, and for what its ranks meet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import Any

import pytest

from anyrank.world.connections import Connections
from anyrank.world.ranks import Ranks


@contextlib.contextmanager
def warnings_of(name: str) -> Generator[list[str]]:
    """What a logger gets at WARNING."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(name).removeHandler(handler)


@contextlib.contextmanager
def meetings() -> Generator[list[str]]:
    """What the ranks meet for; one of a single rank is none."""
    met: list[str] = []
    usual = Ranks._gather

    def spied(self: Ranks, connections: Any, data: bytes, what: str) -> Any:
        met.append(what)
        return usual(self, connections, data, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_gather", spied)
        yield met


@contextlib.contextmanager
def collectives() -> Generator[list[tuple[str, int]]]:
    """What goes over the ranks' connections: the collective, and the bytes that each rank gets."""
    found: list[tuple[str, int]] = []
    allgather, broadcast = Connections.allgather, Connections.broadcast

    def spied(self: Connections, data: bytes, length: int, what: str) -> Any:
        found.append(("allgather", length * self.size))
        return allgather(self, data, length, what)

    def spied_broadcast(self: Connections, data: bytes, length: int, *args: Any) -> bytes:
        found.append(("broadcast", length))
        return broadcast(self, data, length, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "allgather", spied)
        patch.setattr(Connections, "broadcast", spied_broadcast)
        yield found
