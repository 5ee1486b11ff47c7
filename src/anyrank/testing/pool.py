"""The rank pool: processes that serve as the ranks of successive calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyrank.testing import fault, transport
from anyrank.testing.call import Call, Rank
from anyrank.testing.fault import Fault
from anyrank.testing.server import ForkServer
from anyrank.testing.transport import Task

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - mkdtemp creates the folder in it
CLOSE_SECONDS = 1.0
LEAST_PORT = 20_000


class RankPool:
    """Up to `max_ranks` processes, started when first needed and reused by every call.

    A world of size W is the first W processes. Every call has a new default process group (gloo)
    and a new state. A rank that dies or hangs is replaced; the others are kept. Use the pool as a
    context manager, or use `run_ranks`, which has one pool per process.

    Args:
        max_ranks: the largest world size.
    """

    def __init__(self, max_ranks: int = 8) -> None:
        self.max_ranks = max_ranks
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ranks: list[Rank] = []
        self._server: ForkServer | None = None
        self._folder = Path()
        self._num_calls = 0

    def run(
        self,
        world_size: int,
        job: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 300.0,
        grace: float = 10.0,
        faults: Sequence[Fault] = (),
        env: Mapping[str, str] | None = None,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `job(*args, **kwargs)` on every rank of a world, and wait.

        Each rank starts with the environment, working directory and sys.path of the caller, with
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets
        them, and with torch's defaults and seed 0. Arguments and results are copied by pickle.

        Args:
            world_size: number of ranks, 1 to `max_ranks`.
            job: a function at the top level of a module that the ranks can import.
            *args: positional arguments of the job, the same on every rank.
            timeout: seconds for the job, without the start of processes and imports.
            grace: seconds for the other ranks to end after the first failure.
            faults: faults to inject, all of which must be reached.
            env: additional environment variables.
            init: whether to initialize torch.distributed.
            **kwargs: keyword arguments of the job.

        Returns:
            The values that the ranks returned, by rank; `Died` for a rank that a fault ended.

        Raises:
            RanksFailed: a rank raised, died unexpectedly or did not end in time.
            FaultNotReached: no rank failed, but the point of a fault was never passed.
            ValueError: an argument is wrong, or the ranks cannot import the job.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(
                f"world_size={world_size}: must be between 1 and max_ranks={self.max_ranks}"
            )
        fault.check(faults, world_size)
        pickled = transport.pack((job, args, kwargs))
        with self._lock:
            server, ranks = self._ready(world_size)
            self._num_calls += 1
            store = self._folder / f"store{self._num_calls}"
            common = {**os.environ, **_fixed_environ(world_size)}
            tasks = [
                Task(
                    rank=rank,
                    world_size=world_size,
                    store=str(store) if init else None,
                    environ={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
                    cwd=os.getcwd(),
                    path=list(sys.path),
                    name=transport.name_of(job),
                    job=pickled,
                    faults=[injected for injected in faults if injected.rank == rank],
                )
                for rank in range(world_size)
            ]
            call = Call(server, ranks)
            try:
                call.run(tasks, timeout, grace)
            except BaseException:  # Ctrl-C, or the server has ended; no rank may continue
                self._abandon()
                raise
            finally:
                store.unlink(missing_ok=True)
        return call.conclude(transport.name_of(job), faults)

    def _ready(self, world_size: int) -> tuple[ForkServer, list[Rank]]:
        """Return the server and the first ranks of the pool, all alive and idle."""
        if self._owner != os.getpid():
            raise RuntimeError(
                "this RankPool belongs to the parent process. Create another one in this process"
            )
        if self._server is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix="anyrank-", dir=parent))
            self._server = ForkServer(str(self._folder))
        try:
            self._server.watch()
            for index in range(world_size):
                if index == len(self._ranks):
                    self._ranks.append(self._start(self._server))
                elif self._ranks[index].pid in self._server.died:
                    self._ranks[index].conn.close()
                    self._ranks[index] = self._start(self._server)
        except BaseException:
            self._abandon()
            raise
        return self._server, self._ranks[:world_size]

    def _start(self, server: ForkServer) -> Rank:
        """Fork one rank."""
        pid, conn = server.fork()
        return Rank(pid, conn, self._folder / str(pid))

    def _abandon(self) -> None:
        """Kill all processes now; the next call starts new ones."""
        server, self._server = self._server, None
        for rank in self._ranks:
            rank.conn.close()
        self._ranks = []
        if server is not None:
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End all ranks; a later call would start new ones."""
        if self._server is None or self._owner != os.getpid():
            return
        for rank in self._ranks:
            rank.conn.close()  # so that an idle rank exits normally, which coverage tools need
        deadline = time.monotonic() + CLOSE_SECONDS
        pids = {rank.pid for rank in self._ranks}
        with contextlib.suppress(RuntimeError, OSError):
            while not pids <= self._server.died.keys() and time.monotonic() < deadline:
                self._server.watch(0.05)
        self._abandon()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _fixed_environ(world_size: int) -> dict[str, str]:
    """Return the variables that are the same on every rank: torchrun's, one thread, loopback."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def find_port() -> int:
    """Find a free port of this machine outside of the ephemeral range.

    A port in that range may be free now, and a moment later be used for a connection.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first if first > LEAST_PORT else 65_536
    while True:
        port = random.SystemRandom().randrange(LEAST_PORT, end)  # independent of seeds
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


pools: dict[int, RankPool] = {}


def run_ranks(world_size: int, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a job on the pool of this process, which the first call creates, and exit closes.

    Takes the arguments of `RankPool.run`: timeout, grace, faults, env and init are for the pool,
    and all others are for the job.
    """
    __tracebackhide__ = True
    if os.getpid() not in pools:
        pools[os.getpid()] = RankPool()
        atexit.register(close_pool)
    return pools[os.getpid()].run(world_size, job, *args, **kwargs)


def close_pool() -> None:
    """Close the pool of `run_ranks` if it exists; the next call creates a new pool."""
    pool = pools.pop(os.getpid(), None)
    if pool is not None:
        pool.close()
