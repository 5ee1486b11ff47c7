"""The tensors of a step of a run as a listing: all of them, or some, with their bytes' places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anyrank.errors import CorruptCheckpoint
from anyrank.files.block_sums import sums_name
from anyrank.files.listing import FileInfo, Listing, TensorFill
from anyrank.files.manifest import FORMAT, MANIFEST, Manifest, RankFiles, data_name
from anyrank.files.storage import Storage, join_path
from anyrank.sources.rank_index import OwnTensor, Placed, RankIndex, read_indexes, run_each
from anyrank.sources.run_step import read_index
from anyrank.sources.step_index import INDEX, StepIndex, parse
from anyrank.tensors.box import row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.spec import Chunk, StoredTensor


class Opened(NamedTuple):
    """A step whose indexes were read."""

    listing: Listing
    indexes: Mapping[int, RankIndex]


def list_step(
    storage: Storage,
    folder: str,
    ranks: Sequence[RankFiles],
    data: bytes,
) -> Opened:
    """List every tensor of a step, by its index and those of all ranks.

    Args:
        storage: where the folder is.
        folder: folder of the step.
        ranks: files of the ranks that saved it.
        data: bytes of its index.

    Raises:
        CorruptCheckpoint: an index is damaged, or a file is gone or has another size.
    """
    index = parse(data, join_path(folder, INDEX), ranks)
    indexes = read_indexes(storage, folder, ranks, index, range(len(ranks)))
    files = _infos(storage, folder, ranks, range(len(ranks)))
    places: dict[int, list[Chunk]] = {}
    for rank, rank_index in indexes.items():
        for number, placed in rank_index.placed.items():
            places.setdefault(number, []).extend(_chunks(rank, placed))
    tensors: dict[str, StoredTensor] = {}
    for number, tensor in enumerate(index.tensors):
        chunks = tuple(places.get(number, ()))
        numel = sum(chunk.box.numel for chunk in chunks)
        if numel != math.prod(tensor.shape) or not chunks:
            raise CorruptCheckpoint(
                f"{folder}: {tensor.name}: its pieces hold {numel} elements, its shape "
                f"{list(tensor.shape)} needs {math.prod(tensor.shape)}: the step is damaged"
            )
        tensors[tensor.name] = StoredTensor(tensor.name, tensor.shape, tensor.dtype, chunks)
    for rank, rank_index in indexes.items():
        tensors |= {
            name: _stored(name, tensor, rank) for name, tensor in rank_index.own_tensors.items()
        }
    tensors |= {alias: tensors[name].renamed(alias) for alias, name in index.aliases.items()}
    return Opened(Listing(FORMAT, files, tensors, sums=_sums(files)), indexes)


def open_step(
    storage: Storage,
    folder: str,
    manifest: Manifest,
) -> Opened:
    """List every tensor of a committed step, by its manifest."""
    data = read_index(storage, folder, manifest)
    return list_step(storage, folder, manifest.ranks, data)


def list_shapes(index: StepIndex, own_tensors: Mapping[str, OwnTensor]) -> Listing:
    """List names, shapes and dtypes of a step; `locate` finds the bytes of those that are wanted.

    Until then each tensor counts as a file of its own, with its number.

    Args:
        index: index of the step.
        own_tensors: tensors of one rank, from its index.
    """
    shapes = [(t.name, t.shape, t.dtype) for t in index.tensors]
    shapes += [(name, tensor.shape, tensor.dtype) for name, tensor in own_tensors.items()]
    tensors = {
        name: StoredTensor.contiguous(name, shape, dtype, number, 0)
        for number, (name, shape, dtype) in enumerate(shapes)
    }
    tensors |= {alias: tensors[name].renamed(alias) for alias, name in index.aliases.items()}
    return Listing(FORMAT, (), tensors)


@dataclass
class Locator:
    """Finds the bytes of a step that one rank reads, by the indexes of the ranks that have them.

    Attributes:
        storage: where the folder is.
        folder: folder of the step, which may differ between machines.
        files: files of the ranks that saved it.
        index: index of it.
        indexes: ranks' indexes that were read.
        own_rank: rank whose own tensors the listing has.
        met: ranks that have some pieces of a tensor, kept because most tensors are alike.
    """

    storage: Storage
    folder: str
    files: Sequence[RankFiles]
    index: StepIndex
    indexes: dict[int, RankIndex]
    own_rank: int
    met: dict[object, frozenset[int]] = field(default_factory=dict[object, frozenset[int]])

    def ranks_for(self, fills: Iterable[TensorFill]) -> set[int]:
        """Find the ranks whose indexes say where the bytes of some tensors are."""
        ranks: set[int] = set()
        for fill in fills:
            number = fill.stored.chunks[0].file
            if number < len(self.index.tensors):
                ranks |= self._ranks_with(number, fill.target.pieces)
        return ranks

    def _ranks_with(self, number: int, pieces: tuple[Piece, ...]) -> frozenset[int]:
        """Find the ranks that may have elements of some pieces of a tensor."""
        tensor = self.index.tensors[number]
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
        new = {*ranks} - self.indexes.keys()
        args = (self.storage, self.folder, self.files, self.index, new, threads)
        self.indexes |= read_indexes(*args)

    def locate(self, fills: Sequence[TensorFill]) -> list[TensorFill]:
        """Return the fills with places for what they want; files are numbered as ranks."""
        located: list[TensorFill] = []
        for fill in fills:
            number, stored = fill.stored.chunks[0].file, fill.stored
            if number >= len(self.index.tensors):
                tensor = self.indexes[self.own_rank].own_tensors[stored.name]
                chunks = _stored(stored.name, tensor, self.own_rank).chunks
            else:
                chunks = self._chunks_for(number, fill.target.pieces)
            located.append(replace(fill, stored=replace(stored, chunks=chunks)))
        return located

    def _chunks_for(self, number: int, pieces: tuple[Piece, ...]) -> tuple[Chunk, ...]:
        return tuple(
            chunk
            for rank in sorted(self._ranks_with(number, pieces))
            for chunk in _chunks(rank, self.indexes[rank].placed.get(number, ()))
            if any(piece.box.intersect(chunk.box) for piece in pieces)
        )

    def open(self, ranks: Iterable[int], threads: int) -> Listing:
        """List these ranks' files, after a check that they are as they were written.

        Raises:
            CorruptCheckpoint: a file is gone, or has another size.
        """
        files = _infos(self.storage, self.folder, self.files, sorted(ranks), threads)
        return Listing(FORMAT, files, {}, sums=_sums(files))


def _chunks(rank: int, placed: Iterable[Placed]) -> list[Chunk]:
    return [Chunk(box, rank, offset, row_major(box.sizes)) for box, offset in placed]


def _stored(name: str, tensor: OwnTensor, rank: int) -> StoredTensor:
    return StoredTensor(name, tensor.shape, tensor.dtype, tuple(_chunks(rank, tensor.placed)))


def _sums(files: Sequence[FileInfo]) -> dict[int, str]:
    """Map the ranks to the names of the checksum files."""
    return {rank: sums_name(info.path) for rank, info in enumerate(files)}


def _infos(
    storage: Storage,
    folder: str,
    files: Sequence[RankFiles],
    ranks: Sequence[int],
    threads: int = 16,
) -> tuple[FileInfo, ...]:
    """Describe the data files of all ranks, in their order; those of `ranks` as they are now.

    Raises:
        CorruptCheckpoint: a file is gone, or has another size.
    """
    paths = [join_path(folder, data_name(rank)) for rank in range(len(files))]
    infos = [FileInfo(path, f.size, "") for path, f in zip(paths, files, strict=True)]

    def look(rank: int) -> None:
        info = storage.find(paths[rank])
        if info is None:
            raise CorruptCheckpoint(f"{paths[rank]}: is missing, but {MANIFEST} lists it")
        if info.size != infos[rank].size:
            raise CorruptCheckpoint(
                f"{paths[rank]}: has {info.size} bytes, {MANIFEST} says {infos[rank].size}: the "
                "file is truncated or was written to"
            )
        infos[rank] = info

    run_each(look, ranks, threads)
    return tuple(infos)
