"""Fresh ranks for every measurement, and their memory as the kernel counts it. Linux only.

A rank is forked from a server that has imported everything and done nothing else, so all start
alike, in a fraction of a second. Nothing is reused: a process that has loaded once keeps its pages
for the next load, which falsifies both time and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from machine import MADV_POPULATE_WRITE, PAGE, warm_memory

HERE = Path(__file__).parent
SAMPLE_SEC = 0.015
START_SEC = 120.0
PRESENT, FILE_OR_SHARED = 1 << 63, 1 << 61

Stages = Iterator[dict[str, Any]]


@dataclass
class Outcome:
    """What a set of ranks did.

    Attributes:
        stages: one entry a stage, each with one table a rank.
        baseline_bytes, peak_bytes, final_bytes: Pss_Anon over all ranks, before the timed stage, at
            its highest and after it; 0 when it was not sampled.
        error: the traceback of the first rank that failed; "" when none did.
    """

    stages: list[list[dict[str, Any]]] = field(default_factory=list)
    baseline_bytes: int = 0
    peak_bytes: int = 0
    final_bytes: int = 0
    error: str = ""


class Launcher:
    """Starts fresh ranks.

    Args:
        preload: module that imports all that any contender needs.
    """

    def __init__(self, preload: str) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        # The server of some Python versions ignores sys.path.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
        self.preload = preload
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([preload])

    def run(
        self,
        size: int,
        job: Callable[..., Stages],
        *args: Any,
        sample: bool = False,
        warm_bytes: int = 0,
        timeout_sec: float = 300.0,
    ) -> Outcome:
        """Run a job on fresh ranks, all stages in step.

        Args:
            size: how many ranks.
            job: called as job(rank, size, *args) on each rank, inside a gloo group. It yields a
                table when it is ready, one after its timed stage, and one for every stage after.
            args: of the job.
            sample: sum the ranks' Pss_Anon during the timed stage.
            warm_bytes: memory to touch and free right before the timed stage.
            timeout_sec: for the whole of it; the ranks are killed then.
        """
        outcome = Outcome()
        ends: list[connection.Connection] = []
        processes: list[Any] = []
        deadline = time.monotonic() + timeout_sec
        try:
            port = _free_port()
            for rank in range(size):
                ours, theirs = self.context.Pipe()
                given = (theirs, self.preload, rank, size, port, job, args)
                process = self.context.Process(target=_rank, args=given, daemon=True)
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            pids = [process.pid or 0 for process in processes]
            self._stages(outcome, ends, pids, sample, warm_bytes, deadline)
        except (EOFError, OSError, TimeoutError) as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.join(2 if not outcome.error else 0)
                if process.is_alive():
                    process.kill()
                process.join()
        return outcome

    def _stages(
        self,
        outcome: Outcome,
        ends: list[connection.Connection],
        pids: list[int],
        sample: bool,
        warm_bytes: int,
        deadline: float,
    ) -> None:
        while True:
            timed = len(outcome.stages) == 1
            if timed and warm_bytes:
                warm_memory(warm_bytes)
            watch = pids if sample and timed else []
            if watch:
                outcome.baseline_bytes = outcome.peak_bytes = summed_pss(pids)
            for end in ends if outcome.stages else ():
                end.send("go")
            tables = _collect(ends, deadline, lambda: _raise_peak(outcome, watch))  # noqa: B023
            if tables is None:
                return
            errors = [table["error"] for table in tables if "error" in table]
            if errors:
                outcome.error = errors[0]
                return
            if watch:
                outcome.final_bytes = _raise_peak(outcome, watch)
            outcome.stages.append(tables)


def _raise_peak(outcome: Outcome, pids: list[int]) -> int:
    now = summed_pss(pids) if pids else 0
    outcome.peak_bytes = max(outcome.peak_bytes, now)
    return now


def _collect(
    ends: list[connection.Connection], deadline: float, between: Callable[[], object]
) -> list[dict[str, Any]] | None:
    """One table from each rank, or None when all have ended. `between` is called while waiting.

    Raises:
        TimeoutError: not all came in time.
        EOFError: a rank died.
    """
    tables: list[dict[str, Any] | None] = [{}] * len(ends)
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting:
        start = time.monotonic()
        if start > deadline:
            raise TimeoutError(f"{len(waiting)} ranks did not answer in time")
        between()
        left = max(0.001, SAMPLE_SEC - (time.monotonic() - start))
        for end in connection.wait(list(waiting), left):
            number = waiting.pop(end)  # type: ignore[arg-type]
            tables[number] = end.recv()  # type: ignore[union-attr]
            if "error" in (tables[number] or {}):
                return [table for table in tables if table]
    if all(table is None for table in tables):
        return None
    return [table or {} for table in tables]


def summed_pss(pids: list[int]) -> int:
    """Anonymous memory of several processes in bytes, a page that n share counted once."""
    from anyrank.testing import pss_anon

    return sum(pss_anon(pid) for pid in pids)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank(
    end: connection.Connection,
    preload: str,
    rank: int,
    size: int,
    port: int,
    job: Callable[..., Stages],
    args: tuple[Any, ...],
) -> None:
    """One rank from fork to exit: each stage waits for the launcher's word."""
    try:
        if preload not in sys.modules:
            raise RuntimeError(f"the server did not import {preload}: start it by itself to see")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        for table in job(rank, size, *args):
            end.send(table)
            end.recv()
        end.send(None)
        end.close()
        dist.destroy_process_group()
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            end.send({"error": f"rank {rank}: {traceback.format_exc()}"})
    finally:
        sys.stdout.flush()


def settle() -> None:
    """Leave nothing of the start for the measured stage: garbage, free memory, shared pages."""
    libc = ctypes.CDLL(None)
    own_inherited_pages(libc)
    gc.collect()
    libc.malloc_trim(0)


def own_inherited_pages(libc: ctypes.CDLL) -> None:
    """Copy now what the fork shares with the server, so that no contender pays for that later.

    Without this, the first write to an inherited page counts as memory that the contender added.
    """
    import numpy as np

    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            where, rights = line.split()[:2]
            if rights != "rw-p":
                continue
            start, stop = (int(text, 16) for text in where.split("-"))
            pagemap.seek(start // PAGE * 8)
            entries = np.frombuffer(pagemap.read((stop - start) // PAGE * 8), np.uint64)
            mine = (entries & np.uint64(PRESENT) != 0) & (entries & np.uint64(FILE_OR_SHARED) == 0)
            edges = np.flatnonzero(np.diff(np.concatenate(([False], mine, [False]))))
            for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                address, length = start + low * PAGE, (high - low) * PAGE
                libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), MADV_POPULATE_WRITE)
