"""Where ranks find each other, at their first call: what connects them is kept for the next ones,
until the default group goes or they fail on it.
"""

from __future__ import annotations

import json
import socket
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from anyrank import faults
from anyrank.errors import RankError
from anyrank.settings import TIMEOUT_SEC
from anyrank.world.background import Helper
from anyrank.world.connections import Connections
from anyrank.world.device import boot_id
from anyrank.world.group import default_store, key_of
from anyrank.world.store import Store, StoreLost
from anyrank.world.waits import Notes, Wait

CONNECT_SEC = 120.0  # for connections between ranks that have just met
MACHINE_BYTES = 512  # of what a rank says of its machine

_Key = tuple[tuple[int, ...], int]  # ranks, and a channel between them

_kept: dict[_Key, Connections] = {}
_taken: set[_Key] = set()  # channels that a thread uses
_world: list[weakref.ref[Any]] = []  # the default group that they were opened under


def connections_of(ranks: Sequence[int], rank: int, call: str, channel: int = 0) -> Connections:
    """What connects the ranks, opened where that is not done yet. All of `ranks`.

    Args:
        ranks: global ranks, in the group's order.
        rank: this process's own.
        call: what the ranks call, for messages.
        channel: 0, or one of `new_channel`.

    Raises:
        RankError: not every rank came within ANYRANK_TIMEOUT_SEC, or one has died.
    """
    if not _world or _world[0]() is not dist.group.WORLD:
        _kept.clear()
        _world[:] = [weakref.ref(dist.group.WORLD, lambda _: _kept.clear())]
    key = tuple(ranks), channel
    if key in _kept and _has_ended(_kept[key]):
        if _kept[key].notes.is_death:  # who is dead does not come again under this default group
            raise _kept[key].notes.as_error()
        del _kept[key]
    if key not in _kept:
        _kept[key] = _connect(ranks, rank, call, channel)
    return _kept[key]


def channels_of(ranks: Sequence[int]) -> set[int]:
    """The channels between these ranks that this process uses."""
    return {channel for others, channel in _taken if others == tuple(ranks)}


@contextmanager
def taken(ranks: Sequence[int], channel: int) -> Generator[None, None, None]:
    """While a channel is used."""
    key = tuple(ranks), channel
    _taken.add(key)
    try:
        yield
    finally:
        _taken.discard(key)


def _has_ended(kept: Connections) -> bool:
    """Whether this or another rank has failed on connections."""
    try:
        if kept.notes.ended():
            kept.fail(kept.notes.as_error())
    except StoreLost:
        pass  # who waits will see what is gone
    return kept.has_failed


def _connect(ranks: Sequence[int], rank: int, call: str, channel: int) -> Connections:
    shared = default_store()
    prefix = f"anyrank/{key_of(ranks)}/{channel}"
    try:
        notes = Notes(ranks, rank, _next_store(shared, prefix, rank))
    except StoreLost as error:
        raise RankError(_lost(call, error)) from error
    try:
        return _meet(notes, call)
    except StoreLost as error:
        raise notes.end(_lost(call, error)) from error
    except RankError:
        raise
    except BaseException as error:
        notes.end(f"rank {rank} left {call}: {type(error).__name__}: {error}", [rank], "it left")
        raise


def _lost(call: str, error: StoreLost) -> str:
    return f"{call}: {error}: its process or its machine is gone, or the network to it"


def _next_store(shared: Any, prefix: str, rank: int) -> Store:
    """The part of the store for the next connections of these ranks: all count how often they have
    opened some, and leave out those that others have given up.
    """
    opened = Store(shared, prefix)
    while True:
        store = Store(shared, f"{prefix}/{opened.count(f'opened/{rank}')}")
        if not store.has(["end"]):
            return store


def _meet(notes: Notes, call: str) -> Connections:
    """Wait until all ranks have come, and connect to them. All ranks."""
    notes.arrive(0)
    wait = Wait(notes, call, closed=list, number=0)
    wait.is_noted = True  # and stays so
    while not notes.wait_for_all(0, wait.look_sec):
        faults.point("ranks.meet")
        wait.look()
    connections = Connections(notes, _connected(notes, call))
    # This also waits until all are connected: a rank that ended before would break slower ones.
    machine = json.dumps([socket.gethostname(), boot_id()]).encode()
    every = connections.allgather(machine, MACHINE_BYTES, "connecting the ranks")()
    machines = [tuple(json.loads(each.rstrip(b"\0"))) for each in every]
    places = [*dict.fromkeys(machines)]
    notes.nodes = tuple(map(places.index, machines))
    notes.hosts = tuple(host for host, _ in places)
    return connections


def _connected(notes: Notes, call: str) -> Any:
    """gloo's connections of ranks that have met. All ranks."""
    limit = min(float(TIMEOUT_SEC.get()), CONNECT_SEC)
    end = time.monotonic() + limit + 5

    def connect() -> Any:
        # Not new_group(), whose names and keys the user's groups share.
        index, size = notes.ranks.index(notes.rank), len(notes.ranks)
        return dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
            notes.store.inner, index, size, timedelta(seconds=limit)
        )

    def look() -> None:
        if time.monotonic() > end:
            raise RuntimeError("no answer")

    try:
        with Helper() as helper:
            return helper.call(connect, look, 1.0)
    except RuntimeError as error:
        text = str(error).partition("\n")[0][:200]
        who = f"{call}: rank {notes.rank} could not connect to the others"
        raise notes.end(f"{who} within {limit:.0f} s: {text}") from error
