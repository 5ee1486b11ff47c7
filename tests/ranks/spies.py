"""What a rank of a test is told, and for what its ranks meet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import Any

import pytest

from anyrank.world.agreement import CONNECTING
from anyrank.world.connections import Connections


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
    usual = Connections.talk

    def spied(self: Connections, exchange: Any, what: str) -> Any:
        if what != CONNECTING:
            met.append(what)
        return usual(self, exchange, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "talk", spied)
        yield met
