"""A rank that dies within a message is named within seconds, on all ranks that wait for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.test_promise_4_one_ranks_error import SECONDS
from torch import nn

import anyrank
from anyrank import faults
from anyrank.loading.sharing.passing import Passing, exchange
from anyrank.testing import Died, Fault, run_ranks
from anyrank.world import connections
from anyrank.world.group import default_store
from anyrank.world.ranks import open_ranks

NUMEL = 128 << 20  # bytes, of which the first have arrived long before the last


def tell_when_it_begins(message: torch.Tensor) -> None:
    """Let the sender know that its first byte is here."""
    while not message[0]:
        time.sleep(0.0002)
    default_store().set("half a message", "1")


def job_half_a_message() -> Any:
    start = time.monotonic()
    try:
        with open_ranks(None, "test()") as ranks:
            if dist.get_rank() == 0:
                with Passing(ranks, "half a message") as passing:
                    wait = passing.send(torch.ones(NUMEL, dtype=torch.uint8), 1)
                    default_store().wait(["half a message"])
                    faults.point("test.within")
                    wait()
            elif dist.get_rank() == 1:
                message = torch.zeros(NUMEL, dtype=torch.uint8)
                threading.Thread(target=tell_when_it_begins, args=(message,), daemon=True).start()
                exchange(ranks, [], [(message, 0)], "half a message")
            else:
                ranks.gather("the end", None)
    except anyrank.RankError as error:
        return str(error), list(error.causes), time.monotonic() - start
    return "no error"


def test_the_receiver_of_half_a_message_does_not_wait_for_the_rest() -> None:
    fault = Fault(rank=0, point="test.within", how="kill")
    dead, *others = run_ranks(3, job_half_a_message, faults=[fault])
    assert isinstance(dead, Died)
    for text, causes, seconds in others:
        assert "rank 0" in text
        assert causes == [0]
        assert seconds < SECONDS + 3


def job_half_a_broadcast() -> Any:
    """A long value of rank 0, which is killed when its first byte has arrived."""
    start = time.monotonic()
    usual = connections.as_tensor

    def spied(data: bytes) -> torch.Tensor:
        tensor = usual(data)
        if len(data) > NUMEL:
            threading.Thread(target=tell_when_it_begins, args=(tensor,), daemon=True).start()
        return tensor

    def die_when_it_begins() -> None:
        default_store().wait(["half a message"])
        faults.point("test.within")

    try:
        with open_ranks(None, "test()") as ranks, pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 0:
                threading.Thread(target=die_when_it_begins, daemon=True).start()
            else:
                patch.setattr(connections, "as_tensor", spied)
            ranks.run_on_one("half a value", lambda: b"1" * NUMEL)
            time.sleep(1 if ranks.rank == 0 else 0)  # where all of it has arrived in time
            ranks.gather("the end", None)
    except anyrank.RankError as error:
        return str(error), list(error.causes), time.monotonic() - start
    return "no error"


def test_the_receiver_of_half_a_broadcast_does_not_wait_for_the_rest() -> None:
    fault = Fault(rank=0, point="test.within", how="kill")
    dead, (text, causes, seconds) = run_ranks(2, job_half_a_broadcast, faults=[fault])
    assert isinstance(dead, Died)
    assert text == "rank 0 died or stopped responding; see its log for the cause"
    assert causes == [0]
    assert seconds < SECONDS + 3


def job_wait_for_a_late_rank(folder: str) -> str:
    """What the process itself, torch's C++ included, prints while it waits."""
    dist.init_process_group("gloo")  # through torch's TCPStore, as under torchrun
    log = f"{folder}/{dist.get_rank()}.txt"
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2.5)
    kept = os.dup(2)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        with anyrank.Checkpoints(f"{folder}/run", anyrank.TrainState(nn.Linear(1, 1))) as ckpts:
            ckpts.resume()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        dist.destroy_process_group()
    return Path(log).read_text()


def test_torch_prints_nothing_of_a_rank_that_comes_late(tmp_path: Path) -> None:
    assert run_ranks(2, job_wait_for_a_late_rank, str(tmp_path), init=False) == ["", ""]
