"""Connects ranks at their first call, and keeps the connections for later calls, until the default
group is destroyed or a call fails on them.

Arriving ranks are counted: each writes its machine into the job's store, and adds 1 to a counter.
The last rank writes the list of machines, for which the others wait.
"""

from __future__ import annotations

import itertools
import json
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from anyrank import faults
from anyrank.errors import RankError
from anyrank.world.agreement import connect_neighbors
from anyrank.world.connections import Connections
from anyrank.world.device import boot_id
from anyrank.world.group import default_store, hash_ranks
from anyrank.world.pairs import open_mesh, open_pairs
from anyrank.world.store import Store, StoreLost
from anyrank.world.waits import GroupState, Wait, arrival_key

MACHINES_SEC = 60.0  # to read one key of the store for each rank
ASKING_SEC = 0.0005  # per rank, between two polls by a rank that waits for the others

_Key = tuple[tuple[int, ...], int]  # ranks, and a channel between them

_connections: dict[_Key, Connections] = {}
# The default group at the time when _connections were opened.
_default_group: list[weakref.ref[Any]] = []


def get_connections(ranks: Sequence[int], rank: int, call: str, channel: int = 0) -> Connections:
    """Return the connections of the ranks; open them if they are not open yet. Collective on
    `ranks`.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's global rank.
        call: the call that the ranks make, for messages.
        channel: 0, or the number of a thread's own connections (`BackgroundSave`).

    Raises:
        RankError: not every rank arrived within ANYRANK_TIMEOUT_SEC, or one has died.
    """
    if not _default_group or _default_group[0]() is not dist.group.WORLD:
        _connections.clear()
        _default_group[:] = [weakref.ref(dist.group.WORLD, lambda _: _connections.clear())]
    key = tuple(ranks), channel
    if key in _connections and _has_ended(_connections[key]):
        if _connections[key].state.has_dead_rank:  # the default group still contains the dead rank
            raise _connections[key].state.as_error()
        del _connections[key]
    if key not in _connections:
        _connections[key] = _connect(ranks, rank, call, channel)
    return _connections[key]


def open_connections() -> dict[str, Connections]:
    """Return all connections of this process, by a name that is the same on all their ranks."""
    return {f"{[*ranks]} {channel}": opened for (ranks, channel), opened in [*_connections.items()]}


def _has_ended(connections: Connections) -> bool:
    """Return whether this or another rank has failed on the connections."""
    try:
        if connections.state.has_ended():
            connections.fail(connections.state.as_error())
    except StoreLost:
        pass  # the next wait reports the error
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
        state.end(
            f"rank {rank} gave up in {call!r}: {type(error).__name__}: {error}", [rank], "it left"
        )
        raise


def _lost_text(call: str, error: StoreLost) -> str:
    return f"{call}: {error}. The process or machine that hosts the store is down or unreachable."


def _next_store(job_store: Any, prefix: str, rank: int) -> Store:
    """Return the part of the store for the next connections of these ranks. Each rank counts how
    often it has opened connections, and skips those that other ranks have ended.
    """
    counter = Store(job_store, prefix)
    while True:
        store = Store(job_store, f"{prefix}/{counter.count(f'opened/{rank}')}")
        if not store.has(["end"]):
            return store


def _meet_ranks(state: GroupState, call: str) -> Connections:
    """Wait until all ranks have arrived, and connect to the neighbors. Collective."""
    group = open_pairs(state)
    wait = Wait(state, call, find_closed=list, number=0)
    wait.has_arrived = True
    state.arrive(0, json.dumps([socket.gethostname(), boot_id()]))
    if state.store.count("here") == len(state.ranks):
        state.store.set("machines", _find_machines(state))
    # One process answers all ranks, so with more ranks each one polls less often.
    pause_sec = min(len(state.ranks) * ASKING_SEC, wait.poll_sec)
    while not state.store.wait(["machines"], wait.poll_sec, pause_sec):
        faults.point("ranks.meet")
        wait.poll()
    hosts, runs = json.loads(state.store.call(lambda store: store.get("machines")))
    state.hosts = tuple(hosts)
    state.nodes = tuple(node for node, ranks in runs for _ in range(ranks))
    connected = range(len(state.ranks)) if group is None else ()
    connections = Connections(state, group or open_mesh(state, call), connected)
    # This also waits until all are connected, because a rank that ends earlier would break slower
    # ones.
    connect_neighbors(connections)
    return connections


def _find_machines(state: GroupState) -> str:
    """Return the machines as text: their names, and how many consecutive ranks are on each.

    It is the only value that grows with the number of machines. Each rank needs it to name ranks by
    machine, and to know which ranks share its machine.
    """
    keys = [arrival_key(0, rank) for rank in state.ranks]
    texts = state.store.call(lambda store: [store.get(key).decode() for key in keys], MACHINES_SEC)
    machines = [(host, boot) for host, boot in map(json.loads, texts)]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    runs = itertools.groupby(numbers[machine] for machine in machines)
    return json.dumps([[host for host, _ in numbers], [(n, len([*run])) for n, run in runs]])
