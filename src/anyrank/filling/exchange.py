"""Transfers between ranks: who reads which block and who receives it, in one order on all ranks.

Each rank walks the same list in windows. A window is read, sent, received and put in place before
the next one starts, so a rank never stages more than a window, and a failed rank keeps the schedule
until the window's end, where all ranks learn of it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from anyrank import faults
from anyrank.files.listing import Fill, Listing
from anyrank.files.pages import use_large_pages
from anyrank.files.reader import Job, Reader, copy_into
from anyrank.filling.strategy import Decision
from anyrank.tensors.plan import GAP_BYTES, JointRead, Read, joint_reads, plan_reads
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, replicas
from anyrank.tensors.spec import StoredTensor
from anyrank.world.ranks import Interrupted, Ranks

MIN_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One block: read by `reader`, each part wanted by some ranks.

    Attributes:
        target: position in the list of what is wanted.
        block: the box in the file, and where its parts go in each member's local tensor.
        reader: global rank.
    """

    target: int
    block: JointRead
    reader: int

    @property
    def staged_bytes(self) -> int:
        """What a reader stages at most: the block, and its parts where they have to be copied."""
        return self.block.read.nbytes * (1 if self.block.is_whole else 2)


def move(
    wanted: Sequence[Fill],
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
    block = max(MIN_BLOCK_BYTES, window // len(coordinates))
    transfers = _plan_transfers(wanted, reader.listing, coordinates, decision.readers, block)
    exchange = _Exchange(ranks, reader, lambda n: wanted[n].local)
    exchange.run(transfers, window)
    return exchange.bytes_sent


def read_own(wanted: Sequence[Fill], reader: Reader, ranks: Ranks) -> None:
    """Fill this rank's shares from the files, which are open. Each rank by itself.

    Ranks start at different files, so that they do not all wait for the same file.

    Raises:
        Interrupted: another rank failed.
        LoadError: this rank failed to read.
    """
    use_large_pages((share.local for share in wanted), ranks.ranks_on_node)
    jobs = [
        Job(read, read.of(share.local))
        for share in wanted
        for read in plan_reads(share.stored, share.held.pieces)
    ]
    reader.run(jobs, ranks.index * len(reader.listing.files) // ranks.size)


def joint_reads_of(
    index: int,
    held: ShardedTensor,
    stored: StoredTensor,
    coordinates: Mapping[int, Coordinates],
    listing: Listing,
) -> list[JointRead]:
    """What is read of a tensor, and who wants it. Equal on all ranks.

    Args:
        index: position of the tensor in the list that `coordinates` counts.
        held: the tensor, as any rank holds it.
        stored: where its bytes are.
        coordinates: of every rank, by global rank.
        listing: what the source holds. In memory, no rank reads what it does not want.
    """
    return joint_reads(stored, replicas(index, held, coordinates), gap_bytes(stored, listing))


def gap_bytes(stored: StoredTensor, listing: Listing) -> int:
    """How long rows may be that are read whole for columns of them; in memory nothing is."""
    in_memory = any(listing.files[chunk.file].in_memory for chunk in stored.chunks)
    return 0 if in_memory else GAP_BYTES


def _plan_transfers(
    wanted: Sequence[Fill],
    listing: Listing,
    coordinates: Mapping[int, Coordinates],
    readers: Sequence[int] | None,
    block_bytes: int,
) -> Iterator[_Transfer]:
    """Cut what all ranks want into blocks and give each one reader.

    Args:
        wanted: in the same order on all ranks.
        listing: what the source holds.
        coordinates: of every rank.
        readers: the ranks that see the files, in turn; None lets the ranks that want a part of a
            block take turns.
        block_bytes: of one block at most.
    """
    turns: Counter[tuple[int, ...]] = Counter()
    for number, share in enumerate(wanted):
        for joint in joint_reads_of(share.index, share.held, share.stored, coordinates, listing):
            for block in joint.cut(block_bytes):
                who = tuple(readers) if readers is not None else block.takers
                yield _Transfer(number, block, who[turns[who] % len(who)])
                turns[who] += 1


def _windows(transfers: Iterator[_Transfer], window_bytes: int) -> Iterator[list[_Transfer]]:
    """Consecutive transfers that stage at most `window_bytes` together (or one)."""
    window: list[_Transfer] = []
    total = 0
    for transfer in transfers:
        if window and total + transfer.staged_bytes > window_bytes:
            yield window
            window, total = [], 0
        window.append(transfer)
        total += transfer.staged_bytes
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
            mine = [t for t in window if t.reader == self.ranks.rank]
            read = {id(t): _staging(t.block.read) for t in mine}
            try:
                faults.point("load.exchange")
                self.reader.run([Job(t.block.read, read[id(t)]) for t in mine])
            except Exception as error:  # the others still wait for this window's blocks
                problem = error
            arrived = self._pass_on(window, read)
            self._agree(problem)
            for target, part, values in arrived:
                copy_into(part.of(self.locals_of(target)), values)

    def _pass_on(
        self, window: Sequence[_Transfer], read: Mapping[int, torch.Tensor]
    ) -> list[tuple[int, Read, torch.Tensor]]:
        """Send what this rank has read; what it wants of the window: target, part, values."""
        rank = self.ranks.rank
        sent, received = list[tuple[torch.Tensor, int]](), list[tuple[torch.Tensor, int]]()
        arrived: list[tuple[int, Read, torch.Tensor]] = []
        for transfer in window:
            for part, members in transfer.block.parts:
                if transfer.reader == rank:
                    inside = part.box.relative_to(transfer.block.read.box.offsets)
                    values = read[id(transfer)][inside.slices()]
                    others = [member for member in members if member != rank]
                    if others:
                        payload = values.contiguous().view(-1).view(torch.uint8)
                        sent += [(payload, member) for member in others]
                elif rank in members:
                    values = _staging(part)
                    received.append((values.view(-1).view(torch.uint8), transfer.reader))
                else:
                    continue
                if rank in members:
                    arrived.append((transfer.target, part, values))
        self.ranks.exchange(sent, received, "passing on the weights")
        self.bytes_sent += sum(payload.numel() for payload, _ in sent)
        return arrived

    def _agree(self, problem: Exception | None) -> None:
        failed = self.ranks.any(problem is not None, "passing on the weights")
        if problem is not None:
            raise problem
        if failed:
            raise Interrupted


def _staging(read: Read) -> torch.Tensor:
    return torch.empty(read.box.sizes, dtype=read.stored.dtype, device="cpu")
