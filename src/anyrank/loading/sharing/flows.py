"""The flow of file tensors between ranks, in blocks that each rank reads from the files.

A file is a source that every rank that sees it can read completely. Its wanted parts are cut into
blocks. Each block has one reader, which sends parts of it to the ranks that want them. Every rank
computes the same rounds, with its own transfers; in one round a rank reads as much as it may stage.
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
from anyrank.tensors.reads import GAP_BYTES, Read
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, replicas
from anyrank.tensors.spec import StoredTensor

MIN_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor, or a part of one, that some ranks fill, and this rank's work on it.

    Attributes:
        name: name in the model that is filled.
        index: index among the tensors that this rank fills; -1 if it fills none, or a different
            model.
        strips: places of its elements in the source.
        transfers: this rank's transfers, in the order of all ranks.
        stored_dtype, wire_dtype, target_dtype: dtypes in the source, between the ranks, in the
            model.
        nbytes: limit of its bytes that all ranks receive.
        is_compared: whether it must already be equal, and is not written.
        twin: number of the source tensor that stands in for `dst`, if two tensors of src are
            compared because dst ties them; else -1.
        reads: place of a held box -> the read of a file that provides it.
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
        index: position in the list to which the ranks' `Coordinates` refer.
        tensor: the tensor on this rank.
        stored: the place of its bytes.
    """

    index: int
    tensor: ShardedTensor
    stored: StoredTensor


@dataclass(frozen=True)
class FileFlows:
    """The plan that says who reads which block of the files, and who receives it.

    Attributes:
        wanted: the tensors, in the same order on every rank; `Flow.index` is a position in it.
        listing: contents of the source.
        coordinates: coordinates of every rank, by global rank.
        nodes: global rank -> its machine.
        reading_ranks: ranks that see the files and read in turn; None: the ranks that want a block.
        stage_bytes: limit of the bytes that a rank reads in one round; one whole block may exceed
            it.
    """

    wanted: Sequence[Wanted]
    listing: Listing
    coordinates: Mapping[int, Coordinates]
    nodes: Mapping[int, int]
    reading_ranks: Sequence[int] | None
    stage_bytes: int

    def rounds(self, rank: int) -> Iterator[list[Flow]]:
        """Yield a rank's part of the reads and transfers before each agreement of the ranks.

        Raises:
            LoadError: the files do not contain all of a tensor; on every rank.
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
        """Yield the reads of a tensor, each with the rank that does it."""
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
        """Return the transfers of a tensor that a rank sends or receives, block by block."""
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
    """Return a tensor's flow in one round, for the blocks in a range of numbers."""
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
    """Return the position of a block's first transfer."""
    return bisect_left(transfers, block, key=lambda transfer: transfer.box_number)


def wire_dtype(stored: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the dtype in which values pass between ranks: the smaller of the two."""
    return min((stored, target), key=lambda dtype: dtype.itemsize)


def gap_bytes(stored: StoredTensor, listing: Listing) -> int:
    """Return the size limit of rows that are read whole for some columns; 0 for memory."""
    in_memory = any(listing.files[chunk.file].in_memory for chunk in stored.chunks)
    return 0 if in_memory else GAP_BYTES
