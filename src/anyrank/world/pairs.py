"""A gloo group of some ranks, in which a pair of ranks connects at its first message."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from anyrank.settings import TIMEOUT_SEC
from anyrank.world.helper_thread import HelperThread
from anyrank.world.waits import GroupState

log = logging.getLogger("anyrank.world")

GLOO_SEC = 60  # gloo waits this much longer than anyrank, whose error names the missing ranks
CONNECT_SEC = 120.0  # for a full mesh of connections between ranks that have just arrived


def gloo_timeout() -> timedelta:
    """Return how long gloo may wait: longer than anyrank waits."""
    return timedelta(seconds=TIMEOUT_SEC.get() + GLOO_SEC)


def open_pairs(state: GroupState) -> Any:
    """Open a gloo group without connections; None if this torch supports only the full mesh.

    It writes this rank's address into the store, and does not wait.
    """
    # torch has no public way; see docs/dev/private-names.md. new_group() would share its names and
    # keys with the user's groups.
    gloo: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        options = gloo._Options()
        devices = [gloo.create_device(interface=name, lazy_init=True) for name in names]
        options._devices = devices or [gloo.create_default_device(lazy_init=True)]
        options._threads = 2 * len(options._devices)
    except (AttributeError, TypeError) as error:
        _tell_of_mesh(str(error))
        return None
    options._timeout = gloo_timeout()
    return gloo(state.store.inner, state.ranks.index(state.rank), len(state.ranks), options)


@cache
def _tell_of_mesh(reason: str) -> None:
    log.info(
        "this torch version connects all pairs of ranks at the first call, which takes longer: %s",
        reason,
    )


def open_mesh(state: GroupState, call: str) -> Any:
    """Open a gloo group of ranks that have all arrived, and connect all pairs. Collective."""
    limit = min(float(TIMEOUT_SEC.get()), CONNECT_SEC)
    end = time.monotonic() + limit + 5

    def connect() -> Any:
        index, size = state.ranks.index(state.rank), len(state.ranks)
        return dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
            state.store.inner, index, size, timedelta(seconds=limit)
        )

    def check_deadline() -> None:
        if time.monotonic() > end:
            raise RuntimeError("no answer")

    try:
        with HelperThread() as helper:
            return helper.call(connect, check_deadline, 1.0)
    except RuntimeError as error:
        text = str(error).partition("\n")[0][:200]
        failure = f"{call}: rank {state.rank} could not connect to the others"
        raise state.end(f"{failure} within {limit:.0f} s: {text}") from error
