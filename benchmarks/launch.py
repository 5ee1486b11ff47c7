"""Fresh ranks for every measurement, on CPUs or devices, their clock and memory. Linux only.

A rank is forked from a server that has imported everything and done nothing else, so all start
alike, in a fraction of a second. Nothing is reused, and so `anyrank.testing` starts no ranks here:
a process that has loaded once keeps its pages for the next load, which falsifies time and memory.

On which device a rank computes is said once, to `Launcher`; a job asks `device` for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import math
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
from typing import TYPE_CHECKING, Any

from bench import HERE, MADV_POPULATE_WRITE, PAGE, warm_memory

if TYPE_CHECKING:
    import torch

PRESENT, FILE_OR_SHARED = 1 << 63, 1 << 61

# Kind of device -> the backends of its ranks.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "sim": "cpu:gloo,sim:simccl"}
KIND = "ANYRANK_BENCH_DEVICE"  # variable of a rank that has a device other than the CPU

Table = dict[str, Any]
Stages = Iterator[Table]
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for products that add in one order
    # What asks for GPUs while it is imported must not begin with them: ranks are forked later.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
End = Any  # of a pipe to a rank


@dataclass
class Outcome:
    """What a set of ranks did.

    Attributes:
        stages: one entry a stage, each with one table a rank. In the last one a rank that raised
            has {"error": traceback, "class", "text"}, another {"end": "died" or "hangs"}.
    """

    stages: list[list[Table]] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The traceback of a rank that raised, or how another one ended; "" when none failed."""
        failed = [table for table in self.stages[-1] if has_failed(table)] if self.stages else []
        failed.sort(key=lambda table: "error" not in table)
        return next((str(one.get("error") or f"a rank {one['end']}") for one in failed), "")


def has_failed(table: Table) -> bool:
    """Whether a rank raised, died or hangs."""
    return "error" in table or "end" in table


class Launcher:
    """Starts fresh ranks.

    Args:
        preload: module that imports all that a job needs, beside what `preload.py` does.
        kind: of the ranks' devices, of `BACKENDS`; ranks share them where there are fewer.

    Attributes:
        ends_at: on the monotonic clock: no job goes on after it.
    """

    def __init__(self, preload: str, kind: str = "cpu") -> None:
        os.environ |= ENVIRON
        # The server of some Python versions ignores sys.path.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
        self.preload, self.kind = preload, kind
        self.ends_at = math.inf
        self.context = multiprocessing.get_context("forkserver")

    @functools.cached_property
    def is_ready(self) -> bool:
        """Starts the server, which has imported everything before a clock runs."""
        self.context.set_forkserver_preload([self.preload, "preload"])
        process = self.context.Process(target=str)
        process.start()
        process.join()
        return True

    def values(self, size: int, job: Callable[..., Any], *args: Any, **limits: Any) -> list[Any]:
        """What a job returns on each of so many fresh ranks; raises as `tables`."""
        return [table["value"] for table in self.tables(size, job, *args, **limits)[0]]

    def tables(
        self, size: int, job: Callable[..., Any], *args: Any, **limits: Any
    ) -> list[list[Table]]:
        """The stages of a job that no rank may fail in.

        Raises:
            RuntimeError: one did.
        """
        given: dict[str, Any] = {"timeout_sec": 900.0, **limits}
        outcome = self.run(size, job, *args, **given)
        if outcome.error:
            raise RuntimeError(outcome.error)
        return outcome.stages

    def run(
        self,
        size: int,
        job: Callable[..., Any],
        *args: Any,
        warm_bytes: int = 0,
        grace_sec: float = 0.0,
        timeout_sec: float = 300.0,
    ) -> Outcome:
        """Run a job on fresh ranks, all stages in step; the first failure of a rank ends it.

        Args:
            size: how many ranks.
            job: called as job(*args) on each rank, inside a gloo group. It yields a table when it
                is ready, one after its timed stage, and one for every stage after; or it returns a
                value, that of the only stage.
            args: of the job.
            warm_bytes: memory to touch and free right before the timed stage.
            grace_sec: in which the other ranks may still answer once one has failed.
            timeout_sec: for the whole of it; the ranks are killed then.
        """
        outcome = Outcome()
        assert self.is_ready
        deadline = min(time.monotonic() + timeout_sec, self.ends_at)
        ends: list[End] = []
        processes: list[Any] = []
        try:
            port = _free_port()
            for rank in range(size):
                ours, theirs = self.context.Pipe()
                given = (theirs, self.preload, self.kind, rank, size, port, job, args)
                processes.append(self.context.Process(target=_rank, args=given, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            while not outcome.error:
                if len(outcome.stages) == 1 and warm_bytes:  # before the timed one
                    warm_memory(warm_bytes)
                for end in ends if outcome.stages else ():
                    with contextlib.suppress(OSError):  # it has died since
                        end.send("go")
                tables = _answers(ends, grace_sec, deadline)
                if all(table.get("is_last") for table in tables):
                    break
                outcome.stages.append(tables)
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.join(0 if outcome.error else 2)
                process.kill()
                process.join()
        return outcome


def _answers(ends: list[End], grace_sec: float, deadline: float) -> list[Table]:
    """One table from each rank."""
    tables: list[Table] = [{"end": "hangs"} for _ in ends]
    waiting: dict[End, int] = {end: number for number, end in enumerate(ends)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready: list[End] = connection.wait([*waiting], left)
        for end in ready:
            number = waiting.pop(end)
            try:
                tables[number] = end.recv()
            except (EOFError, OSError):
                tables[number] = {"end": "died"}
            if has_failed(tables[number]):
                deadline = min(deadline, time.monotonic() + grace_sec)
    return tables


def torchrun(size: int) -> list[str]:
    """The beginning of a command that starts so many ranks as a user does; with ENVIRON."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*line, f"--nproc-per-node={size}"]


def _free_port() -> int:
    # Not the pool's: the sources may be those of an older commit, which lack it.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank(
    end: End,
    preload: str,
    kind: str,
    rank: int,
    size: int,
    port: int,
    job: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """One rank from fork to exit: each stage waits for the launcher's word."""
    try:
        if preload not in sys.modules:
            raise RuntimeError(f"the server did not import {preload}: start it by itself to see")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        import torch.distributed as dist

        join(kind)
        made = job(*args)
        for table in made if inspect.isgenerator(made) else [{"value": made}]:
            end.send(table)
            end.recv()
        end.send({"is_last": True})
        end.close()
        dist.destroy_process_group()
    except EOFError:
        pass
    except BaseException as error:
        told = {"error": f"rank {rank}: {traceback.format_exc()}"}
        told |= {"class": type(error).__name__, "text": str(error)}
        with contextlib.suppress(OSError):
            end.send(told)
    finally:
        sys.stdout.flush()


def join(kind: str) -> None:
    """Be a rank with a device of this kind: its own, or one that it shares."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if kind == "sim":
        import tests.device.sim  # noqa: F401 - before anything asks for an accelerator
    if kind != "cpu":
        os.environ[KIND] = kind
        # What asks for the rank's own device goes by its local rank.
        os.environ["LOCAL_RANK"] = str(device().index)
        torch.accelerator.set_device_index(device().index)
    dist.init_process_group(BACKENDS[kind])


# -- what a job asks for --------------------------------------------------------------------------


def device() -> torch.device:
    """This rank's: where its tensors are."""
    import torch

    kind = os.environ.get(KIND, "cpu")
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, int(os.environ["RANK"]) % torch.accelerator.device_count())


def meet() -> None:
    """Wait for all ranks, each with nothing under way on its device."""
    import torch
    import torch.distributed as dist

    if device().type != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()


def timed(work: Callable[[], Any], watch_host: bool = False) -> Table:
    """A call on all ranks, from the instant at which they begin to that at which all are done.

    Args:
        work: what is called.
        watch_host: sample anonymous memory of this process, which takes time.

    Returns:
        seconds, CPU seconds of this process, and peaks over what there was before: `host_bytes`
        where the host was watched, `peak_bytes` of the device, or of the host for want of one.
    """
    import torch

    from anyrank.testing import PeakMemory

    on_device, before = device().type != "cpu", 0
    meet()
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
    with PeakMemory() if watch_host else contextlib.nullcontext() as host:
        start, cpu = time.perf_counter(), time.process_time()
        work()
        meet()
        found = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    if host:
        found["host_bytes"] = found["peak_bytes"] = host.peak_bytes
    if on_device:
        found["peak_bytes"] = torch.accelerator.max_memory_allocated() - before
    return found


def settle() -> None:
    """Leave nothing of the start for the measured stage: garbage, free memory, shared pages."""
    libc = ctypes.CDLL(None)
    own_inherited_pages(libc)
    gc.collect()
    libc.malloc_trim(0)


def own_inherited_pages(libc: ctypes.CDLL) -> None:
    """Copy now what the fork shares with the server, so that no contender pays for that later."""
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
