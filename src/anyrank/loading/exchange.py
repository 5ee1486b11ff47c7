"""Transfers between ranks: who reads which block and who receives it, in one order on all ranks.

Each rank walks the same list in windows. A window is read, sent, received and put in place before
the next one starts, so a rank never stages more than a window, and a failed rank keeps the schedule
until the window's end, where all ranks learn of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from anyrank import faults
from anyrank.files.reader import Job, Reader, copy_into
from anyrank.loading.strategy import Decision
from anyrank.tensors.plan import Read, plan_reads
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, replicas
from anyrank.tensors.spec import StoredTensor
from anyrank.world.pages import use_large_pages
from anyrank.world.ranks import Interrupted, Ranks

MIN_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One block: read by `reader`, wanted by `members` (global ranks).

    Attributes:
        target: position in the list of what is wanted.
        read: the box in the file, and where it goes in each member's local tensor.
    """

    target: int
    read: Read
    reader: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A share to be filled.

    Attributes:
        index: position of the tensor in the list that `coordinates` counts.
        held: the tensor, and what this rank holds of it.
        stored: where its bytes are.
        local: this rank's memory, of the held tensor's local shape.
    """

    index: int
    held: ShardedTensor
    stored: StoredTensor
    local: torch.Tensor


def move(
    wanted: Sequence[Wanted],
    reader: Reader,
    ranks: Ranks,
    decision: Decision,
    coordinates: Mapping[int, Coordinates],
    buffer_bytes: int,
) -> int:
    """Fill every rank's shares as decided; bytes that this rank sent. All ranks, the same list.

    Raises:
        Interrupted: another rank failed.
        LoadError: this rank failed to read.
    """
    if decision.name == "own":
        read_own(wanted, reader, ranks)
        return 0
    use_large_pages((share.local for share in wanted), ranks.ranks_on_node)
    window = buffer_bytes // 2  # the rest is the reader's and the transport's
    transfers = _plan_transfers(wanted, coordinates, decision.readers, window)
    exchange = _Exchange(ranks, reader, lambda n: wanted[n].local)
    exchange.run(transfers, window)
    return exchange.bytes_sent


def read_own(wanted: Sequence[Wanted], reader: Reader, ranks: Ranks) -> None:
    """Fill this rank's shares from the files, which are open. Each rank by itself.

    Ranks start at different files, so that they do not all wait for the same file.

    Raises:
        Interrupted: another rank failed.
        LoadError: this rank failed to read.
    """
    use_large_pages((share.local for share in wanted), ranks.ranks_on_node)
    jobs = [
        Job(read, share.local[read.local_slices()])
        for share in wanted
        for read in plan_reads(share.stored, share.held.pieces)
    ]
    reader.run(jobs, ranks.index * len(reader.listing.files) // ranks.size)


def _plan_transfers(
    wanted: Sequence[Wanted],
    coordinates: Mapping[int, Coordinates],
    readers: Sequence[int] | None,
    window_bytes: int,
) -> Iterator[_Transfer]:
    """Cut what all ranks want into blocks and give each one reader.

    Args:
        wanted: in the same order on all ranks.
        coordinates: of every rank.
        readers: the ranks that see the files, in turn; None lets the ranks that want a block take
            turns.
        window_bytes: see `windows`.
    """
    block = max(MIN_BLOCK_BYTES, window_bytes // len(coordinates))
    turn = 0
    for number, share in enumerate(wanted):
        for pieces, members in replicas(share.index, share.held, coordinates).items():
            who = tuple(readers) if readers is not None else members
            for read in plan_reads(share.stored, pieces):
                for box in read.box.cut(block // read.stored.dtype.itemsize):
                    yield _Transfer(number, read.part(box), who[turn % len(who)], members)
                    turn += 1


def _windows(transfers: Iterator[_Transfer], window_bytes: int) -> Iterator[list[_Transfer]]:
    """Consecutive transfers of at most `window_bytes` together (or one)."""
    window: list[_Transfer] = []
    total = 0
    for transfer in transfers:
        if window and total + transfer.read.nbytes > window_bytes:
            yield window
            window, total = [], 0
        window.append(transfer)
        total += transfer.read.nbytes
    if window:
        yield window


class _Exchange:
    """Runs transfers on one rank. All ranks run the same list.

    Args:
        ranks: the group.
        reader: reads this rank's blocks.
        locals_of: this rank's memory for a position in the list of what is wanted.
    """

    def __init__(
        self, ranks: Ranks, reader: Reader, locals_of: Callable[[int], torch.Tensor]
    ) -> None:
        self.ranks = ranks
        self.reader = reader
        self.locals_of = locals_of
        self.bytes_sent = 0

    def run(self, transfers: Iterator[_Transfer], window_bytes: int) -> None:
        """Fill this rank's share.

        Raises:
            Interrupted: another rank failed.
            LoadError: this rank failed to read.
        """
        for window in _windows(transfers, window_bytes):
            problem: Exception | None = None
            staged: dict[int, torch.Tensor] = {}
            mine = [(n, t) for n, t in enumerate(window) if t.reader == self.ranks.rank]
            for number, transfer in mine:
                staged[number] = _staging(transfer)
            try:
                faults.point("load.exchange")
                self.reader.run([Job(t.read, staged[n]) for n, t in mine])
            except Exception as error:  # the others still wait for this window's blocks
                problem = error
            self._pass_on(window, staged)
            self._agree(problem)
            for number, transfer in enumerate(window):
                if self.ranks.rank in transfer.members:
                    local = self.locals_of(transfer.target)
                    copy_into(local[transfer.read.local_slices()], staged[number])

    def _pass_on(self, window: Sequence[_Transfer], staged: dict[int, torch.Tensor]) -> None:
        rank = self.ranks.rank
        sent, received = list[tuple[torch.Tensor, int]](), list[tuple[torch.Tensor, int]]()
        for number, transfer in enumerate(window):
            if transfer.reader == rank:
                payload = staged[number].view(-1).view(torch.uint8)
                sent += [(payload, member) for member in transfer.members if member != rank]
            elif rank in transfer.members:
                staged[number] = _staging(transfer)
                received.append((staged[number].view(-1).view(torch.uint8), transfer.reader))
        self.ranks.exchange(sent, received, "passing on the weights")
        self.bytes_sent += sum(payload.numel() for payload, _ in sent)

    def _agree(self, problem: Exception | None) -> None:
        failed = self.ranks.any(problem is not None, "passing on the weights")
        if problem is not None:
            raise problem
        if failed:
            raise Interrupted


def _staging(transfer: _Transfer) -> torch.Tensor:
    read = transfer.read
    return torch.empty(read.box.sizes, dtype=read.stored.dtype, device="cpu")
