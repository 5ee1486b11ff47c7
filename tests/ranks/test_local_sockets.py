"""Short messages between the ranks of one machine: in order, of any length, and never waited for in
vain.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, run_ranks
from anyrank.world import local_sockets
from anyrank.world import ranks as ranks_module
from anyrank.world.local_sockets import MAX_BYTES, Address, connect_locally, open_door
from anyrank.world.ranks import open_ranks

LENGTHS = [0, 1, MAX_BYTES - 64, MAX_BYTES, MAX_BYTES + 1, 5 * MAX_BYTES]


def job_lengths() -> bool:
    with open_ranks() as ranks:
        assert ranks.local is not None
        for length in LENGTHS:
            # Ranks send different lengths, so that only some are short.
            mine = os.urandom(length if ranks.index else 3)
            found = ranks.gather((ranks.rank, mine))
            assert [rank for rank, _ in found] == list(ranks.ranks)
            assert [len(data) for _, data in found] == [3] + [length] * (ranks.size - 1)
            assert found[ranks.index][1] == mine
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_of_any_length_arrive_in_order(size: int) -> None:
    assert run_ranks(size, job_lengths) == [True] * size


def job_halves(order: list[int]) -> list[bool]:
    with open_ranks() as ranks:
        flags = [ranks.start_any(ranks.rank == number, "flag") for number in range(5)]
        assert ranks.gather(ranks.rank, "value") == [0, 1, 2]
        return [flags[number]() for number in order]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 3], []])
def test_several_exchanges_can_be_under_way(order: list[int]) -> None:
    """Also one that is never waited for, as that of a batch in a loop which is left."""
    assert run_ranks(3, job_halves, order) == [[number < 3 for number in order]] * 3


def job_other_things() -> str:
    with open_ranks() as ranks, pytest.raises(anyrank.RankError) as caught:
        ranks.start_any(False, "that")() if ranks.rank else ranks.gather(1, "this")
    return str(caught.value)


def test_ranks_that_do_different_things_are_told_which() -> None:
    for text in run_ranks(2, job_other_things):
        assert "this on rank 0, that on rank 1" in text


def job_dies() -> Any:
    start = time.monotonic()
    try:
        with open_ranks() as ranks:
            if ranks.rank == 1:
                faults.point("test.within")
            ranks.gather(None, "the end")
    except anyrank.RankError as error:
        return str(error), list(error.causes), time.monotonic() - start
    return "no error"


def test_a_rank_that_dies_is_named_at_once() -> None:
    first, dead, last = run_ranks(3, job_dies, faults=[Fault(1, "test.within", "kill")])
    assert isinstance(dead, Died)
    for text, causes, seconds in (first, last):
        assert "rank 1" in text
        assert causes == [1]
        assert seconds < 6


def job_no_door(refusing: int) -> tuple[bool, list[int]]:
    """On a rank that has no such sockets, or that the others cannot reach."""
    start = local_sockets.CONNECT_SEC
    local_sockets.CONNECT_SEC = 0.5
    opened = ranks_module.open_door

    def closed(size: int) -> local_sockets.Door | None:
        door = opened(size)
        assert door is not None
        if int(os.environ["RANK"]) != 1:
            return door
        if refusing == 0:
            return None
        door.address = Address(door.address.name + b"?", door.address.secret)
        return door

    ranks_module.open_door = closed
    try:
        with open_ranks() as ranks:
            return ranks.local is None, ranks.gather(ranks.rank)
    finally:
        ranks_module.open_door, local_sockets.CONNECT_SEC = opened, start


@pytest.mark.parametrize("refusing", [0, 1])
def test_without_a_connection_all_ranks_go_through_gloo(refusing: int) -> None:
    assert run_ranks(3, job_no_door, refusing) == [(True, [0, 1, 2])] * 3


def test_a_caller_without_the_secret_is_let_in_nowhere() -> None:
    door = open_door(2)
    assert door is not None
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(door.address.name)
    stranger.send(bytes(16) + (1).to_bytes(4, "little"))
    before, local_sockets.CONNECT_SEC = local_sockets.CONNECT_SEC, 0.2
    try:
        door.socket.settimeout(0.2)
        assert connect_locally(door, 0, [door.address] * 2, 1.0, lambda: "") is None
    finally:
        local_sockets.CONNECT_SEC = before
    assert stranger.recv(1) == b""
    stranger.close()
