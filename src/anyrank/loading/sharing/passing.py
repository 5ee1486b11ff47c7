"""Pass tensors from rank to rank, over the connections of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from anyrank.world.connections import Connections
from anyrank.world.helper_thread import HelperThread
from anyrank.world.ranks import Ranks
from anyrank.world.waits import Wait


class Passing:
    """Sends and receives that overlap, within a `with` block.

    The caller must wait for all of them before the block ends.

    Args:
        ranks: the ranks of the call; a single process has no receiver.
        what: description of the tensors, for messages.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._opened = None if ranks.connections is None else ranks.ready()
        self._what = what
        # A wait for a gloo message cannot be cut into slices; one for a collective can.
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
        """Start to send a contiguous CPU tensor; return the function that waits for it."""
        return self._start("send", tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start to fill a contiguous CPU tensor; return the function that waits for it."""
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
    """Send tensors to ranks, and receive different ones in place.

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
