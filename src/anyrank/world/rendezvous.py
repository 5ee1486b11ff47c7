"""Connects ranks at their first call, and keeps the connections for later calls, until the default
group is destroyed or the ranks fail on them.
"""

from __future__ import annotations

import json
import socket
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from anyrank import faults
from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.connections import Connections
from anyrank.world.device import boot_id
from anyrank.world.group import default_store, hash_ranks
from anyrank.world.helper_thread import HelperThread
from anyrank.world.store import Store, StoreLost
from anyrank.world.waits import GroupState, Wait

CONNECT_SEC = 120.0  # for connections between ranks that have just met
MACHINE_BYTES = 512  # of what a rank says of its machine

_Key = tuple[tuple[int, ...], int]  # ranks, and a channel between them

_connections: dict[_Key, Connections] = {}
_default_group: list[weakref.ref[Any]] = []  # the one under which _connections were opened


def get_connections(ranks: Sequence[int], rank: int, call: str, channel: int = 0) -> Connections:
    """The connections of the ranks, opened if they are not yet. All of `ranks`.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's global rank.
        call: what the ranks call, for messages.
        channel: 0, or a thread's own (`BackgroundSave`).

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC, or one has died.
    """
    if not _default_group or _default_group[0]() is not dist.group.WORLD:
        _connections.clear()
        _default_group[:] = [weakref.ref(dist.group.WORLD, lambda _: _connections.clear())]
    key = tuple(ranks), channel
    if key in _connections and _has_ended(_connections[key]):
        if _connections[key].state.has_dead_rank:  # the default group still has the dead rank
            raise _connections[key].state.as_error()
        del _connections[key]
    if key not in _connections:
        _connections[key] = _connect(ranks, rank, call, channel)
    return _connections[key]


def open_connections() -> dict[str, Connections]:
    """All connections of this process, by a name that is the same on all of their ranks."""
    return {f"{[*ranks]} {channel}": opened for (ranks, channel), opened in [*_connections.items()]}


def _has_ended(connections: Connections) -> bool:
    """Whether this or another rank has failed on the connections."""
    try:
        if connections.state.has_ended():
            connections.fail(connections.state.as_error())
    except StoreLost:
        pass  # the next wait reports it
    return connections.has_failed


def _connect(ranks: Sequence[int], rank: int, call: str, channel: int) -> Connections:
    job_store = default_store()
    prefix = f"anyrank/{hash_ranks(ranks)}/{channel}"
    try:
        state = GroupState(ranks, rank, _next_store(job_store, prefix, rank))
    except StoreLost as error:
        raise RankError(_lost_text(call, error)) from error
    try:
        return _meet_ranks(state, call)
    except StoreLost as error:
        raise state.end(_lost_text(call, error)) from error
    except RankError:
        raise
    except BaseException as error:
        state.end(f"rank {rank} left {call}: {type(error).__name__}: {error}", [rank], "it left")
        raise


def _lost_text(call: str, error: StoreLost) -> str:
    return f"{call}: {error}: its process or its machine is gone, or the network to it"


def _next_store(job_store: Any, prefix: str, rank: int) -> Store:
    """The part of the store for the next connections of these ranks. Each rank counts how often it
    has opened some, and skips those that other ranks have ended.
    """
    counter = Store(job_store, prefix)
    while True:
        store = Store(job_store, f"{prefix}/{counter.count(f'opened/{rank}')}")
        if not store.has(["end"]):
            return store


def _meet_ranks(state: GroupState, call: str) -> Connections:
    """Wait until all ranks have arrived, and connect to them. All ranks."""
    state.arrive(0)
    wait = Wait(state, call, find_closed=list, number=0)
    wait.has_arrived = True
    while not state.wait_for_all(0, wait.poll_sec):
        faults.point("ranks.meet")
        wait.poll()
    connections = Connections(state, _open_gloo(state, call))
    # Also waits until all are connected: a rank that ends earlier would break slower ones.
    machine = json.dumps([socket.gethostname(), boot_id()]).encode()
    answers = connections.allgather(machine, MACHINE_BYTES, "connecting the ranks")()
    machines = [tuple(json.loads(answer.rstrip(b"\0"))) for answer in answers]
    unique_machines = [*dict.fromkeys(machines)]
    state.nodes = tuple(map(unique_machines.index, machines))
    state.hosts = tuple(host for host, _ in unique_machines)
    return connections


def _open_gloo(state: GroupState, call: str) -> Any:
    """Open gloo's connections between ranks that have all arrived. All ranks."""
    limit = min(float(TIMEOUT_SEC.get()), CONNECT_SEC)
    end = time.monotonic() + limit + 5

    def connect() -> Any:
        # Not new_group(), whose names and keys the user's groups share.
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
