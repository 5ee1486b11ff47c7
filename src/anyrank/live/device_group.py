"""A separate group for bytes that ranks send from device to device, besides gloo's connections.

It is opened when it is first needed, and kept like gloo's connections. The host never waits inside
the collective library: it polls whether a round is over, and whether the ranks can still continue,
which gloo's connections know. If they cannot, only this group is aborted.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anyrank.world.connections import Connections
from anyrank.world.helper_thread import HelperThread
from anyrank.world.pairs import gloo_timeout

ASK_SEC = 50e-6  # between two polls of a device
MAX_CTAS = 8  # blocks of a device that the library may use, so that computations can continue

Open = Callable[[Any, int, int], Any]  # store, this rank's position, how many -> torch's group


def open_nccl(store: Any, index: int, size: int) -> Any:
    """Open an NCCL group, without `new_group`, which would split it from a device-bound group.

    Its own timeout, which ends the process, is longer than that of anyrank.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - not in builds without CUDA
    options = nccl.Options()
    options.config.max_ctas = MAX_CTAS
    options._timeout = gloo_timeout()
    return nccl(store, index, size, options)


class DeviceGroup:
    """All-to-alls between the devices of some ranks.

    Args:
        connections: connections of the same ranks, which detect failures.
        group: torch's group, which the ranks have opened.
        device: device of this rank.
        nbytes: device memory that the group took.
    """

    def __init__(
        self, connections: Connections, group: Any, device: torch.device, nbytes: int
    ) -> None:
        self.connections, self.group, self.device = connections, group, device
        self.nbytes = nbytes
        self.side = None if device.type == "cpu" else torch.Stream(device)
        # Also at exit, because destroying a group waits for the other ranks.
        self.abort = weakref.finalize(self, _abort, group)

    def start(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        outs: Sequence[int],
        ins: Sequence[int],
        what: str,
    ) -> Round:
        """Start an all-to-all after the current stream's work. Collective.

        Args:
            target, source: uint8 on the device; they must live until the round is over.
            outs, ins: bytes from and to each rank; both ends of a pair must pass the same.
            what: what is moved, for messages.
        """
        sizes = [*outs], [*ins]
        target, source = target[: sum(outs)], source[: sum(ins)]
        if self.side is None:
            work = self.group.alltoall_base(target, source, *sizes)
            return Round(self.connections.collective(work, what))
        main = torch.accelerator.current_stream(self.device)
        self.side.wait_event(_record(main))
        with _current(self.side, main):
            self.group.alltoall_base(target, source, *sizes).wait()  # only the stream waits
            over = _record(self.side)
        wait = polled(self.connections, over.query, what)
        return Round(wait, lambda: main.wait_event(over))

    def settle(self, what: str) -> Callable[[], None]:
        """Return a function that waits for the current stream's work so far. Collective."""
        if self.side is None:
            return lambda: None
        event = _record(torch.accelerator.current_stream(self.device))
        return polled(self.connections, event.query, what)


class Round:
    """An all-to-all that has started.

    Args:
        wait: lets the host wait for its end.
        follow: lets later work of the current stream wait for its end; None: the host waits.
    """

    def __init__(self, wait: Callable[[], None], follow: Callable[[], None] | None = None) -> None:
        self._wait: Callable[[], None] | None = wait
        self._follow = follow

    def finish(self) -> None:
        """Wait for its end, once.

        Raises:
            RankError: the all-to-all cannot end.
        """
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def follow(self) -> None:
        """Let later work of the current stream wait for its end.

        Raises:
            RankError: as for `finish`.
        """
        (self._follow or self.finish)()


def open_group(
    connections: Connections, name: str, open_raw: Open, device: torch.device, what: str
) -> DeviceGroup:
    """Return the ranks' group for devices; the first call opens it. Collective.

    A thread connects it with a first round, which waits for the other ranks inside the library.

    Args:
        connections: connections of the ranks.
        name: name of the library and the ranks' devices, the same on every rank.
        open_raw: function that opens torch's group.
        device: device of this rank.
        what: what is moved, for messages.

    Raises:
        RankError: a rank failed to connect, or died.
    """
    known = connections.device_groups.get(name)
    if known is not None:
        return known
    state = connections.state
    number = len(connections.device_groups)
    store = dist.PrefixStore(f"device/{number}", state.store.inner)  # pyright: ignore[reportPrivateImportUsage]
    free = _free_bytes(device)

    def connect() -> Any:
        with on_device(device):
            group = open_raw(store, connections.index, connections.size)
            ones = [1] * connections.size
            some = torch.zeros(2, connections.size, dtype=torch.uint8, device=device)
            group.alltoall_base(some[0], some[1], ones, ones).wait()
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            return group

    group = _connect(connections, connect, what)
    nbytes = max(0, free - _free_bytes(device))
    known = connections.device_groups[name] = DeviceGroup(connections, group, device, nbytes)
    return known


def _connect(connections: Connections, connect: Callable[[], Any], what: str) -> Any:
    """Connect all ranks, in a thread, because this may wait forever. Collective.

    Raises:
        RankError: a rank failed to connect, or has died.
    """
    number = connections.count_wait()
    with connections.waiting(what, number) as waiting, HelperThread() as helper:
        try:
            return helper.call(connect, waiting.poll, waiting.poll_sec)
        except RuntimeError as error:
            rank = connections.state.rank
            text = f"{what}: rank {rank} could not connect its device: {error}"
            raise connections.state.end(text, [rank], str(error)) from error


def polled(connections: Connections, is_over: Callable[[], bool], what: str) -> Callable[[], None]:
    """Return a function that waits for work of all ranks by polling whether it is over."""
    number, state = connections.count_wait(), connections.state

    def ask() -> bool:
        try:
            return is_over()
        except RuntimeError as error:  # of a device; usually the rank dies
            text = f"{what}: rank {state.rank}'s device: {error}"
            raise state.end(text, [state.rank]) from error

    def wait() -> None:
        with connections.waiting(what, number) as waiting:
            next_sec = time.monotonic() + waiting.poll_sec
            while not ask():
                time.sleep(ASK_SEC)
                if time.monotonic() > next_sec:
                    waiting.poll()
                    next_sec = time.monotonic() + waiting.poll_sec

    return wait


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, or 0 if unknown; other processes change it too."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0


def _record(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


@contextlib.contextmanager
def _current(stream: torch.Stream, before: torch.Stream) -> Generator[None]:
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextlib.contextmanager
def on_device(device: torch.device) -> Generator[None]:
    """Make the device current, because new threads and some scripts have a different one."""
    if device.type == "cpu":
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
