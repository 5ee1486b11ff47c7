"""A rank that dies within a message is named within seconds, on all ranks that wait for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.test_promise_4_one_ranks_error import SECONDS

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, run_ranks
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
                sending = ranks.start_send(torch.ones(NUMEL, dtype=torch.uint8), 1)
                default_store().wait(["half a message"])
                faults.point("test.within")
                sending.wait()
            elif dist.get_rank() == 1:
                message = torch.zeros(NUMEL, dtype=torch.uint8)
                threading.Thread(target=tell_when_it_begins, args=(message,), daemon=True).start()
                ranks.exchange([], [(message, 0)], "half a message")
            else:
                ranks.gather(None, "the end")
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
