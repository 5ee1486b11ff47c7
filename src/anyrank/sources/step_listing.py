"""The tensors of a step of a run: a listing of their shapes, and a locator of their bytes.

The step's index names the tensors and the ranks that have a part of each. The ranks' indexes say
where these parts are in their files. A rank that reads a share needs the indexes of only a few
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anyrank.errors import CorruptCheckpoint, LoadError
from anyrank.files.block_sums import sums_name
from anyrank.files.listing import FileInfo, Listing, Locator, Wanted
from anyrank.files.manifest import FORMAT, MANIFEST, Manifest, RankFiles, data_name, read_manifest
from anyrank.files.storage import Storage, join_path, storage_for
from anyrank.sources.locate import locate_all
from anyrank.sources.rank_index import REQUESTS, Placed, RankIndex, read_indexes, run_each
from anyrank.sources.run_step import read_index
from anyrank.sources.step_index import INDEX, IndexedTensor, StepIndex, parse
from anyrank.tensors.box import row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.spec import Chunk, StoredTensor

SPACING = 1 << 64  # bytes from one tensor to the next, while their chunks are not known


@dataclass
class StepLocator(Locator):
    """Finds the bytes of a step that one rank reads, with the indexes of the ranks that saved them.

    Until then, the tensors are listed as if they were in the step's first file, each whole and
    `SPACING` bytes after the previous one.

    Attributes:
        folder: folder of the step, which may differ between machines.
        files: files of the ranks that saved the step.
        index: index of the step.
        own_tensors: tensors that only one rank has, whose numbers follow those of the index.
        saved: the run, the step and the time of the commit, by which copies are recognized.
        indexes: ranks' indexes that were read.
        met: ranks that have some pieces of a tensor, cached because most tensors have the same
            layout.
    """

    folder: str
    files: Sequence[RankFiles]
    index: StepIndex
    own_tensors: Sequence[IndexedTensor]
    saved: tuple[str, int, str] | None = None
    indexes: dict[int, RankIndex] = field(default_factory=dict[int, RankIndex])
    met: dict[object, frozenset[int]] = field(default_factory=dict[object, frozenset[int]])

    def tensor(self, number: int) -> IndexedTensor:
        """Return a tensor by its number."""
        shared = self.index.tensors
        return shared[number] if number < len(shared) else self.own_tensors[number - len(shared)]

    def list_shapes(self) -> Listing:
        """List names, shapes and dtypes, without chunks."""
        files = (FileInfo(self.folder, 0, ""),) * len(self.files)
        rows = enumerate((*self.index.tensors, *self.own_tensors))
        tensors = {row.name: _listed(row, number) for number, row in rows}
        tensors |= {a: tensors[name].renamed(a) for a, name in self.index.aliases.items()}
        locators: dict[int, Locator] = {0: self}
        return Listing(FORMAT, files, tensors, locators=locators, is_run=True, states_table=True)

    def is_listed(self, stored: StoredTensor) -> bool:
        number = _number_of(stored)
        return stored == _listed(self.tensor(number), number).renamed(stored.name)

    def check_same(self) -> None:
        if self.saved != read_manifest(storage_for(self.folder), self.folder).identity:
            raise LoadError(
                f"{self.folder}: differs from the step whose index was read on another rank. Pass "
                "the same folder on every rank."
            )

    def locate(
        self, wanted: Sequence[Wanted], threads: int
    ) -> tuple[list[StoredTensor], tuple[FileInfo, ...], dict[int, str]]:
        self.read(self.ranks_for(wanted), threads)
        located = self.with_chunks(wanted)
        ranks = {chunk.file for stored in located for chunk in stored.chunks}
        files = self.open(ranks, threads)
        return located, files.files, files.sums

    def ranks_for(self, wanted: Iterable[Wanted]) -> set[int]:
        """Find the ranks whose indexes locate the bytes of some tensors."""
        met = (self._ranks_with(_number_of(stored), pieces) for stored, pieces in wanted)
        return {rank for ranks in met for rank in ranks}

    def _ranks_with(self, number: int, pieces: Sequence[Piece]) -> frozenset[int]:
        """Find the ranks that may have elements of some pieces of a tensor."""
        tensor = self.tensor(number)
        key = tensor.shape, tensor.where, pieces
        if key not in self.met:
            met = (tensor.ranks_with(piece.box) for piece in pieces)
            self.met[key] = frozenset(rank for some in met for rank in some)
        return self.met[key]

    def read(self, ranks: Iterable[int], threads: int) -> None:
        """Read the indexes of some ranks.

        Raises:
            CorruptCheckpoint, CheckpointError: as for `read_indexes`.
        """
        new, storage = {*ranks} - self.indexes.keys(), storage_for(self.folder)
        args = (storage, self.folder, self.files, self.index, new, threads)
        self.indexes |= read_indexes(*args)

    def with_chunks(self, wanted: Iterable[Wanted]) -> list[StoredTensor]:
        """Return the tensors with the chunks that hold the pieces; a chunk's file is the rank.

        Raises:
            CorruptCheckpoint: the ranks' boxes do not cover the pieces.
        """
        return [
            replace(stored, chunks=self._chunks_for(_number_of(stored), pieces))
            for stored, pieces in wanted
        ]

    def _chunks_for(self, number: int, pieces: Sequence[Piece]) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        numel = 0
        for rank in sorted(self._ranks_with(number, pieces)):
            for box, offset in self._placed(rank, number):
                common = 0
                for piece in pieces:
                    both = piece.box.intersect(box)
                    common += 0 if both is None else both.numel
                if common or not box.numel:
                    chunks.append(Chunk(box, rank, offset, row_major(box.sizes)))
                numel += common
        wanted = sum(piece.box.numel for piece in pieces)
        if numel != wanted or (pieces and not chunks):
            tensor = self.tensor(number)
            raise CorruptCheckpoint(
                f"{self.folder}: {tensor.name} (shape {list(tensor.shape)}): the ranks' indexes "
                f"list only {numel} of {wanted} elements. The step is corrupt; use an older one."
            )
        return tuple(chunks)

    def _placed(self, rank: int, number: int) -> Sequence[Placed]:
        """Return the boxes of a tensor that a rank saved."""
        index = self.indexes[rank]
        if number >= len(self.index.tensors):
            return index.own_tensors[self.tensor(number).name].placed
        return index.placed.get(number, ())

    def open(self, ranks: Iterable[int], threads: int) -> Listing:
        """List the files of all ranks; check the sizes of those of the given ranks.

        Raises:
            CorruptCheckpoint: a file is missing, or has a wrong size.
        """
        storage = storage_for(self.folder)
        paths = [join_path(self.folder, data_name(rank)) for rank in range(len(self.files))]
        infos = [FileInfo(path, f.size, "") for path, f in zip(paths, self.files, strict=True)]

        def look(rank: int) -> None:
            info = storage.find(paths[rank])
            if info is None:
                raise CorruptCheckpoint(
                    f"{paths[rank]}: is missing, but {MANIFEST} lists it. Restore it from a copy, "
                    "or use an older step."
                )
            if info.size != infos[rank].size:
                raise CorruptCheckpoint(
                    f"{paths[rank]}: has {info.size} bytes, but {MANIFEST} lists "
                    f"{infos[rank].size}. The file was truncated or changed; restore it from a "
                    "copy, or use an older step."
                )
            infos[rank] = info

        run_each(look, sorted(ranks), threads)
        sums = {rank: sums_name(path) for rank, path in enumerate(paths)}
        return Listing(FORMAT, tuple(infos), {}, sums=sums)


class Opened(NamedTuple):
    """A step, and its indexes that were read."""

    listing: Listing
    indexes: Mapping[int, RankIndex]


def locator_of(
    storage: Storage, folder: str, ranks: Sequence[RankFiles], data: bytes
) -> StepLocator:
    """Read which tensors a step has, and which ranks saved them.

    Args:
        storage: where the folder is.
        folder: folder of the step.
        ranks: files of the ranks that saved it.
        data: bytes of its index.

    Raises:
        CorruptCheckpoint, CheckpointError: as for `read_indexes`, or the step's index is corrupt.
    """
    index = parse(data, join_path(folder, INDEX), ranks)
    owners = read_indexes(storage, folder, ranks, index, index.owners)
    own_tensors = [
        tensor for rank, entry in owners.items() for tensor in own_tensors_of(rank, entry)
    ]
    return StepLocator(folder, ranks, index, own_tensors)


def own_tensors_of(rank: int, index: RankIndex) -> list[IndexedTensor]:
    """Return the tensors that only one rank has."""
    own_tensors = index.own_tensors.items()
    return [
        IndexedTensor(name, tensor.shape, tensor.dtype, (rank,)) for name, tensor in own_tensors
    ]


def list_step(storage: Storage, folder: str, ranks: Sequence[RankFiles], data: bytes) -> Opened:
    """List every tensor of a step with its chunks; read the indexes of all ranks.

    Args:
        storage, folder, ranks, data: as for `locator_of`.

    Raises:
        CorruptCheckpoint, LoadError: an index is corrupt, or a file is missing or has a wrong size.
    """
    locator = locator_of(storage, folder, ranks, data)
    locator.read(range(len(ranks)), REQUESTS)
    return Opened(locate_all(locator.list_shapes()), locator.indexes)


def open_step(storage: Storage, folder: str, manifest: Manifest) -> Opened:
    """List every tensor of a committed step, from its manifest."""
    data = read_index(storage, folder, manifest)
    return list_step(storage, folder, manifest.ranks, data)


def _number_of(stored: StoredTensor) -> int:
    """Return the number of a tensor that is listed only by its shape."""
    return stored.chunks[0].offset // SPACING


def _listed(tensor: IndexedTensor, number: int) -> StoredTensor:
    return StoredTensor.contiguous(tensor.name, tensor.shape, tensor.dtype, 0, number * SPACING)
