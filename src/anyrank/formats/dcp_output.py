"""What torch.distributed.checkpoint reads: a folder of one data file, and `.metadata` of any."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence

import torch

from anyrank.files.output import FileSpan, Output, OutputFile, OutputTensor
from anyrank.formats.run_folder import METADATA, SavedBox
from anyrank.formats.torch_zip import ALIGN, wrap
from anyrank.tensors.box import Box
from anyrank.tensors.writes import PIECE_BYTES

DATA = "__0_0.distcp"


def plan_folder(tensors: Sequence[OutputTensor], tied: Mapping[str, str]) -> Output:
    """A DCP folder of a flat dict of tensors; tied names point at the same bytes."""
    fixed: list[tuple[int, bytes]] = []
    spans: list[FileSpan] = []
    places: list[SavedBox] = []
    position = 0
    for tensor in tensors:
        for box in Box.whole(tensor.shape).cut(PIECE_BYTES // tensor.dtype.itemsize):
            nbytes = box.numel * tensor.dtype.itemsize
            head, tail = wrap(nbytes, box.sizes, tensor.dtype)
            start, length = position + len(head), len(head) + nbytes + len(tail)
            what = (tensor.name, tensor.shape, tensor.dtype, box)
            places.append(SavedBox(*what, DATA, start, position, length))
            padding = bytes(-length % ALIGN)
            fixed += [(position, head), (start + nbytes, tail + padding)]
            spans.append(FileSpan(tensor, box, start))
            position += length + len(padding)
    file = OutputFile(DATA, position, tuple(fixed), tuple(spans))
    return Output((file,), {METADATA: metadata_of(places, tied, by_part=False)}, has_sums=True)


def metadata_of(
    places: Iterable[SavedBox], aliases: Mapping[str, str], by_part: bool = True
) -> bytes:
    """DCP's index of the pieces. An alias points at the bytes of the tensor it is tied to.

    Args:
        places: of every piece.
        aliases: name -> the name of the tensor that it is.
        by_part: whether what precedes a name's first dot is a table of the state, as in runs.
    """
    from torch.distributed.checkpoint.filesystem import (
        _StorageInfo,  # pyright: ignore[reportPrivateUsage] - the format's own, no public name
    )
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        names.setdefault(name, []).append(alias)
    for saved in places:
        box = saved.box
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        info = _StorageInfo(saved.file, saved.start, saved.length)
        for name in (saved.name, *names.get(saved.name, ())):
            described = TensorStorageMetadata(
                TensorProperties(saved.dtype), torch.Size(saved.shape), []
            )
            entry = tensors.setdefault(name, described)
            entry.chunks.append(chunk)
            storage[MetadataIndex(name, box.offsets)] = info
    planner = {name: tuple(name.split(".", 1)) if by_part else (name,) for name in tensors}
    return pickle.dumps(Metadata(dict(tensors), planner, storage, StorageMeta()))
