"""A group of our own for bytes that ranks send from device to device, beside gloo's connections.

It is opened when it is first needed, and kept as gloo's connections are. The host never waits
inside the collective library: it asks whether a round is over, and whether the ranks can still
continue, which gloo's connections know. If they cannot, this group is aborted, and no other.
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

ASK_SEC = 50e-6  # between two questions whether a device has finished a round
MAX_CTAS = 8  # blocks of a device that the library may take from computations meanwhile

Open = Callable[[Any, int, int], Any]  # store, this rank's position, how many -> torch's group


def open_nccl(store: Any, index: int, size: int) -> Any:
    """Open NCCL's group, not by `new_group`, which would split it from one bound to a device.

    Its own timeout, which ends the process, is longer than ours.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - not in builds without CUDA
    options = nccl.Options()
    options.config.max_ctas = MAX_CTAS
    options._timeout = gloo_timeout()
    return nccl(store, index, size, options)


class DeviceGroup:
    """All-to-alls between the devices of some ranks.

    Args:
        connections: connections of the same ranks, which notice failures.
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
        """Start an all-to-all behind the current stream's work. All ranks.

        Args:
            target, source: uint8 on the device; they live until the round is over.
            outs, ins: bytes from and to each rank; both ends of a pair have to give the same.
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
            self.group.alltoall_base(target, source, *sizes).wait()  # the stream does, not the host
            over = _record(self.side)
        wait = polled(self.connections, over.query, what)
        return Round(wait, lambda: main.wait_event(over))

    def settle(self, what: str) -> Callable[[], None]:
        """Return the wait for all that the current stream was asked to do so far. All ranks."""
        if self.side is None:
            return lambda: None
        event = _record(torch.accelerator.current_stream(self.device))
        return polled(self.connections, event.query, what)


class Round:
    """An all-to-all that is under way.

    Args:
        wait: lets the host wait for its end.
        follow: puts later work of the current stream behind it; None to make the host wait.
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
        """Continue behind it.

        Raises:
            RankError: as for `finish`.
        """
        (self._follow or self.finish)()


def open_group(
    connections: Connections, name: str, open_raw: Open, device: torch.device, what: str
) -> DeviceGroup:
    """Open the ranks' group for devices, at the first call. All ranks.

    A thread connects it by a first round, which waits for the other ranks inside the library.

    Args:
        connections: connections of the ranks.
        name: name of the library and the ranks' devices, the same on all ranks.
        open_raw: opens torch's group.
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
    """Connect all ranks in a thread, because that may wait for them for ever. All ranks.

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
    """Return the wait for work that all ranks have started, and that only says if it is over."""
    number, state = connections.count_wait(), connections.state

    def ask() -> bool:
        try:
            return is_over()
        except RuntimeError as error:  # of a device; as a rule the rank dies of it
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
    """Free memory of a device, if it says so; other processes on it change it too."""
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
    """Enter a device: a thread has another current one, as does a script that did not set it."""
    if device.type == "cpu":
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
