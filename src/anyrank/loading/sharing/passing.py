"""Tensors from rank to rank, over the connections of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from anyrank.world.connections import Connections
from anyrank.world.helper_thread import HelperThread
from anyrank.world.ranks import Ranks
from anyrank.world.waits import Wait


class Passing:
    """Sends and receives tensors at the same time, within a `with` block.

    The caller waits for all of them before the block ends.

    Args:
        ranks: the ranks of the call; a process alone has nobody to send to.
        what: description of the tensors, for messages.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._opened = None if ranks.connections is None else ranks.ready()
        self._what = what
        # A wait for gloo's messages, unlike one for its collectives, cannot be cut into slices.
        self._helper: HelperThread | None = None

    def __enter__(self) -> Passing:
        return self

    def __exit__(self, *error: object) -> None:
        if self._helper is not None:
            self._helper.close()

    @property
    def _connections(self) -> Connections:
        assert self._opened is not None
        return self._opened

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to send a contiguous CPU tensor; returns its wait."""
        return self._start("send", tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to fill a contiguous CPU tensor; returns its wait."""
        return self._start("recv", tensor, rank)

    def _start(self, kind: str, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        def wait_for_rank() -> contextlib.AbstractContextManager[Wait]:
            return self._connections.waiting(self._what, None, [rank])

        with wait_for_rank() as waiting:
            work = self._connections.pass_tensor(kind, tensor, rank, waiting)

        def wait() -> None:
            with wait_for_rank() as waiting:
                self._helper = self._helper or HelperThread()
                self._helper.call(work.wait, waiting.poll, waiting.poll_sec)

        return wait


def exchange(
    ranks: Ranks,
    sent: Iterable[tuple[torch.Tensor, int]],
    received: Iterable[tuple[torch.Tensor, int]],
    what: str,
) -> None:
    """Send tensors to ranks, and receive others in place.

    Two ranks must list the tensors that they exchange in the same order.

    Args:
        ranks: the ranks of the call.
        sent: contiguous CPU tensors, each with the global rank of its receiver.
        received: contiguous CPU tensors to fill, each with the global rank of its sender.
        what: description for messages.

    Raises:
        RankError: as for `Ranks.gather`.
    """
    with Passing(ranks, what) as passing:
        waits = [passing.send(tensor, rank) for tensor, rank in sent]
        waits += [passing.receive(tensor, rank) for tensor, rank in received]
        for wait in waits:
            wait()
