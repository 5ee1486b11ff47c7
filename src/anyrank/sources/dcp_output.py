"""The index of torch.distributed.checkpoint, which is also part of a run's step."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping

import torch

from anyrank.sources.run_step import StoredBox


def metadata_of(
    places: Iterable[StoredBox], aliases: Mapping[str, str], by_part: bool = True
) -> bytes:
    """Build DCP's index of the pieces. An alias points at the bytes of the tensor it is tied to.

    Args:
        places: the places of all pieces.
        aliases: name -> the name of the tensor that it is.
        by_part: whether the text before a name's first dot is a table of the state, as in runs.
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
