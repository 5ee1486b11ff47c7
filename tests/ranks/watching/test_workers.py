"""How `anyrank.watch` learns that a DataLoader's worker was killed.

On ranks, as no thread of another test can hold a lock there while a worker is forked.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from anyrank.testing import run_ranks
from anyrank.watching.system import Workers


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_worker_is_named_whether_torch_has_waited_for_it_or_not(
    method: str, is_reaped: bool
) -> None:
    run_ranks(1, kill_a_worker, method, is_reaped)


def kill_a_worker(method: str, is_reaped: bool) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the handler of an earlier loader would raise
    loader = DataLoader(torch.arange(1000), num_workers=2, multiprocessing_context=method)
    with ThreadPoolExecutor(1) as prefetching:  # there torch sets no handler
        batches: Any = prefetching.submit(iter, loader).result()
    next(batches)
    workers = Workers()
    assert workers.find_dead() == []
    killed = batches._workers[0]
    os.kill(killed.pid, signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        assert not killed.is_alive()
    assert workers.find_dead() == [
        f"worker process {killed.pid} of its DataLoader: signal 9 (SIGKILL)"
    ]
    batches._shutdown_workers()


def test_workers_that_torch_ends_were_not_killed() -> None:
    run_ranks(1, end_workers)


def end_workers() -> None:
    batches: Any = iter(DataLoader(torch.arange(1000), num_workers=2))
    next(batches)
    workers, own_pids = Workers(), {worker.pid for worker in batches._workers}
    workers.tick()
    assert own_pids <= workers.known.keys()
    batches._shutdown_workers()
    assert workers.find_dead() == []
    assert own_pids.isdisjoint(workers.known)
