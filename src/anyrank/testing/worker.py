"""The main loop of a rank: receive a call, run its job in a new state, answer, clean up."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from anyrank.testing import fault, transport
from anyrank.testing.transport import END, GO, MET, READY, Raised, Reached, Returned, Task
from anyrank.training.data.worker_exit import kill

THREAD_SECONDS = 1.0
CACHE: type[Any] = type(functools.lru_cache(len))
SPIN_SECONDS = 1.0  # CPU time; an idle group takes a tenth of it in a minute


def work(conn: Connection[Any, Any], stack_file: str) -> None:
    """Run calls until the owner closes the pipe.

    The messages of a call: a Task in; MET out; GO in, after all ranks have met; any number of
    Reached, then Returned or Raised out; END in, after all ranks have answered; READY out. A rank
    that cannot be set up answers Raised at once, and the others get END instead of GO.

    Args:
        conn: the pipe to the owner.
        stack_file: file to which SIGUSR2 or a crash writes the stacks of all threads.
    """
    stacks = open(stack_file, "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(stacks)
    # Not SIGUSR1, because Checkpoints uses it.
    faulthandler.register(signal.SIGUSR2, stacks)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            before = threading.enumerate()
            groups: list[Any] = []
            answer = run(conn.recv(), conn, groups)
            if answer is not None:
                if isinstance(answer, Returned) and (names := _find_left_threads(before)):
                    answer = Raised(f"RuntimeError: threads of the job still run: {names}", None)
                conn.send(answer)
                if isinstance(answer, Raised):
                    _clean_up()
                    groups.clear()  # so that other ranks notice the closed connections
                # Closing connections before END could interrupt a rank that still receives.
                ended = conn.recv()
                assert ended == END
            _clean_up()
            del groups
            if _find_left_threads(before) or _has_partial_group() or _has_spinning_group():
                return  # no other job may run in this process
            conn.send(READY)


def run(task: Task, conn: Connection[Any, Any], groups: list[Any]) -> Returned | Raised | None:
    """Run one job, and add its default group to `groups`.

    Any exception, including SystemExit, is an answer. Returns None if another rank could not be set
    up, so that the job did not run.
    """
    try:
        with warnings.catch_warnings():
            reset(task)
            job, args, kwargs = transport.unpack(task)
            meet(task)
            # A job may destroy the group before its DDP model. The model would then have the last
            # reference, and end the group's threads while it holds the GIL, for which they wait.
            groups.append(dist.group.WORLD)
            conn.send(MET)
            if conn.recv() != GO:
                return None
            fault.arm(task.faults, _reporter(conn))
            value = job(*args, **kwargs)
            fault.disarm()
            return Returned(pickle.dumps(value))
    except BaseException as error:
        return transport.describe(error, skip=1)


def meet(task: Task) -> None:
    """Initialize torch.distributed if the task has a store."""
    if task.store is not None:
        store = dist.FileStore(task.store, task.world_size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size)


def _reporter(conn: Connection[Any, Any]) -> Callable[[fault.Fault], None]:
    """Return a function that reports a fault to the owner. Several threads may call it."""
    lock = threading.Lock()

    def report(reached: fault.Fault) -> None:
        with lock:
            conn.send(Reached(reached))

    return report


def reset(task: Task) -> None:
    """Reset all that an earlier job may have changed to the state of a new process."""
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.cwd)
    sys.path[:] = task.path
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False


def _clean_up() -> None:
    """Release all that the job left; process groups first, because cycles may refer to them."""
    fault.disarm()
    _end_children()
    # A DDP module would end the threads of its group while it holds the GIL, for which they may
    # wait.
    groups = _find_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    gc.collect()
    del groups
    gc.freeze()  # mostly modules; scanning the objects of a large library takes 0.2 s


def _end_children() -> None:
    """End the processes that the job left, such as workers of a loader that was not closed.

    Python collects such a loader after its queues, so torch could not tell the workers to end, and
    would wait ten seconds for them.
    """
    if children := multiprocessing.active_children():
        handler = signal.getsignal(signal.SIGCHLD)
        kill(children)
        signal.signal(signal.SIGCHLD, handler)


def _find_groups() -> list[Any]:
    """Return the existing process groups."""
    # Private, and not in every version of torch.
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def _has_partial_group() -> bool:
    """Return whether a failed init_process_group has changed the group count.

    Groups are numbered, and the numbers must be the same on every rank. The count is reset only
    when the default group is destroyed.
    """
    # Private, and not in every version of torch. Without it, the next call on the rank fails.
    world = getattr(dist.distributed_c10d, "_world", None)
    return getattr(world, "group_count", 0) != 0


def _has_spinning_group() -> bool:
    """Return whether a thread of a gloo group that still exists has used seconds of CPU time.

    If a message arrives for which no thread waits, for example after a failure, the thread of the
    group uses a whole core until the process ends.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = (task / "stat").read_text().rpartition(") ")
            user, system = rest.split()[11:13]
            seconds = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            if name.endswith("(gloo_tcp_loop") and seconds > SPIN_SECONDS:
                return True
    return False


def _forget_meshes() -> None:
    """Clear the caches of DTensor.

    Meshes of the same shape are equal, so the caches would return meshes of an earlier call, whose
    process groups are destroyed.
    """
    modules = [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    classes = [kind for module in modules for kind in vars(module).values() if type(kind) is type]
    for owner in (*modules, *classes):
        for value in vars(owner).values():
            function: Any = value.__func__ if type(value) is staticmethod else value
            if type(function) is CACHE:
                function.cache_clear()
    # Private, and not in every version of torch.
    kind, native = cast("Any", DTensor), getattr(torch, "_C")  # noqa: B009
    with contextlib.suppress(AttributeError):
        kind._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    with contextlib.suppress(AttributeError):
        native._clear_DTensor_sharding_propagator_cache()


def _find_left_threads(before: list[threading.Thread]) -> list[str]:
    """Return the names of new threads that keep a process alive, after a second for each."""
    threads = [thread for thread in threading.enumerate() if thread not in before]
    kept = [thread for thread in threads if not thread.daemon]
    for thread in kept:
        thread.join(THREAD_SECONDS)
    return [thread.name for thread in kept if thread.is_alive()]
