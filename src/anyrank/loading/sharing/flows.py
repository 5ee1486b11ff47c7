"""What flows from rank to rank: tensors of a file, by the blocks that each rank reads of them.

A file is a source that is held whole by the ranks that see it. What all ranks want of it is cut
into blocks; each has one reader, and who wants a part of a block receives it from there. Every rank
comes to the same rounds, each with its own transfers; in one a rank reads what it may stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from anyrank.files.listing import Listing
from anyrank.loading.sharing.shared_reads import shared_reads
from anyrank.loading.sharing.transfers import HeldBox, Strip, Transfer, transfers_of
from anyrank.tensors.layout import Piece
from anyrank.tensors.plan import GAP_BYTES, Read
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, replicas
from anyrank.tensors.spec import StoredTensor

MIN_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Flow:
    """One tensor that some ranks fill, or a part of it, and what this rank has to do with it.

    Attributes:
        name: in the model that is filled.
        index: among what this rank fills; -1 on a rank that fills another model, or none.
        strips: where its elements are in the source.
        transfers: this rank's, in the order of all ranks.
        stored_dtype, wire_dtype, target_dtype: in the source, between the ranks, in the model.
        nbytes: that all ranks receive of it, at most.
        is_compared: whether it is to be equal already, and not written.
        twin: number of the source tensor that takes the place of `dst` where two of src are
            compared, as dst ties them; else -1.
        reads: place of a held box -> what this rank reads of a file to give it.
    """

    name: str
    index: int
    strips: tuple[Strip, ...]
    transfers: tuple[Transfer, ...]
    stored_dtype: torch.dtype
    wire_dtype: torch.dtype
    target_dtype: torch.dtype
    nbytes: int
    is_compared: bool
    twin: int = -1
    reads: Mapping[int, Read] = field(default_factory=dict[int, Read])


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that all ranks fill from the bytes of a file.

    Attributes:
        index: position in the list that the ranks' `Coordinates` count.
        tensor: as this rank holds it.
        stored: where its bytes are.
    """

    index: int
    tensor: ShardedTensor
    stored: StoredTensor


@dataclass(frozen=True)
class FileFlows:
    """Who reads which block of the files, and who receives it.

    Attributes:
        wanted: in the same order on all ranks; `Flow.index` is a position in it.
        listing: what the source holds.
        coordinates: of every rank, by global rank.
        nodes: global rank -> its machine.
        reading_ranks: the ranks that see the files, in turn; None: who wants a block, in turn.
        stage_bytes: that a rank reads in one round at most, or one block.
    """

    wanted: Sequence[Wanted]
    listing: Listing
    coordinates: Mapping[int, Coordinates]
    nodes: Mapping[int, int]
    reading_ranks: Sequence[int] | None
    stage_bytes: int

    def rounds(self, rank: int) -> Iterator[list[Flow]]:
        """A rank's part of what is read, and passed on, before the ranks agree again.

        Raises:
            LoadError: the files hold not all of a tensor; on all ranks.
        """
        turns: Counter[tuple[int, ...]] = Counter()
        staged: Counter[int] = Counter()
        flows: list[Flow] = []
        for number, wanted in enumerate(self.wanted):
            groups = replicas(wanted.index, wanted.tensor, self.coordinates)
            blocks = list(self._blocks(wanted, groups, turns))
            transfers = self._transfers(rank, wanted, groups, blocks)
            first = 0
            for number_of_block, (read, reader) in enumerate(blocks):
                if staged[reader] and staged[reader] + read.nbytes > self.stage_bytes:
                    flows.append(
                        _flow(rank, number, wanted, blocks, transfers, (first, number_of_block))
                    )
                    yield flows
                    flows, first = [], number_of_block
                    staged.clear()
                staged[reader] += read.nbytes
            flows.append(_flow(rank, number, wanted, blocks, transfers, (first, len(blocks))))
        if flows:
            yield flows

    def _blocks(
        self,
        wanted: Wanted,
        groups: Mapping[tuple[Piece, ...], tuple[int, ...]],
        turns: Counter[tuple[int, ...]],
    ) -> Iterator[tuple[Read, int]]:
        """What is read of a tensor, and by which rank."""
        most = max(MIN_BLOCK_BYTES, self.stage_bytes // 2)
        for shared in shared_reads(wanted.stored, groups, gap_bytes(wanted.stored, self.listing)):
            ranks = shared.takers if self.reading_ranks is None else tuple(self.reading_ranks)
            for read in shared.cut(most):
                yield read, ranks[turns[ranks] % len(ranks)]
                turns[ranks] += 1

    def _transfers(
        self,
        rank: int,
        wanted: Wanted,
        groups: Mapping[tuple[Piece, ...], tuple[int, ...]],
        blocks: Sequence[tuple[Read, int]],
    ) -> list[Transfer]:
        """What a rank gives and takes of a tensor, block by block."""
        strip = Strip.whole(0, wanted.stored.shape)
        start = strip.start
        places = [HeldBox(read.box, {reader: start}, self.nodes) for read, reader in blocks]
        pieces = {taker: pieces for pieces, takers in groups.items() for taker in takers}
        transfers = transfers_of(rank, [strip], [places], pieces)
        return sorted(transfers, key=lambda transfer: transfer.box_number)


def _flow(
    rank: int,
    number: int,
    wanted: Wanted,
    blocks: Sequence[tuple[Read, int]],
    transfers: Sequence[Transfer],
    span: tuple[int, int],
) -> Flow:
    """A tensor's flow in one round, of the blocks from one number to another."""
    first, stop = span
    stored, tensor = wanted.stored, wanted.tensor
    own_reads = {n: blocks[n][0] for n in range(first, stop) if blocks[n][1] == rank}
    return Flow(
        name=tensor.name,
        index=number,
        strips=(Strip.whole(0, stored.shape),),
        transfers=tuple(transfers[_start(transfers, first) : _start(transfers, stop)]),
        stored_dtype=stored.dtype,
        wire_dtype=wire_dtype(stored.dtype, tensor.dtype),
        target_dtype=tensor.dtype,
        nbytes=sum(read.nbytes for read, _ in blocks[first:stop]),
        is_compared=False,
        reads=own_reads,
    )


def _start(transfers: Sequence[Transfer], block: int) -> int:
    """Where the transfers of a block begin."""
    return bisect_left(transfers, block, key=lambda transfer: transfer.box_number)


def wire_dtype(stored: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The dtype in which values pass between ranks: the smaller of the two."""
    return min((stored, target), key=lambda dtype: dtype.itemsize)


def gap_bytes(stored: StoredTensor, listing: Listing) -> int:
    """How long rows may be that are read whole for columns of them; in memory nothing is."""
    in_memory = any(listing.files[chunk.file].in_memory for chunk in stored.chunks)
    return 0 if in_memory else GAP_BYTES
