"""`.metadata` is what pickle makes of torch's own objects, and is read without running anything."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from anyrank.sources.dcp_output import DcpPiece, DcpTensor, pickle_metadata
from anyrank.sources.readers import dcp, pickles
from anyrank.tensors.box import Box

HALVES = [Box((0, 0), (2, 4)), Box((2, 0), (300, 4))]
TENSORS = [
    DcpTensor(["model.a", "model.b"], (302, 4), torch.float32, partial(iter, HALVES), 1),
    DcpTensor(["optimizer.\u00e9\U0001f600"], (302, 4), torch.bfloat16, partial(iter, HALVES), 1),
    DcpTensor(["count"], (), torch.int64, partial(iter, [Box((), ())]), 2),
]
FILES = [
    ("__0_0.distcp", [DcpPiece(0, HALVES[0], 0, 255), DcpPiece(1, HALVES[0], 256, 5 << 31)]),
    (
        "__1_0.distcp",
        [
            DcpPiece(0, HALVES[1], 65535, 65536),
            DcpPiece(1, HALVES[1], (1 << 31) - 1, 1 << 31),
            DcpPiece(2, Box((), ()), 1 << 40, 7),
        ],
    ),
]


def expected(tensors: Sequence[DcpTensor]) -> Metadata:
    described = {
        name: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in tensor.boxes()
            ],
        )
        for tensor in tensors
        for name in tensor.names
    }
    storage = {
        MetadataIndex(name, piece.box.offsets): _StorageInfo(file, piece.start, piece.length)
        for file, pieces in FILES
        for piece in pieces
        for name in tensors[piece.number].names
    }
    planner = {name: tuple(name.split(".", 1)) for name in described}
    return Metadata(dict(described), planner, storage, StorageMeta())


def test_the_pickle_means_what_torch_would_have_written() -> None:
    data = b"".join(pickle_metadata(TENSORS, FILES))
    assert pickle.loads(data + b"a seal") == expected(TENSORS)
    read = pickles.loads(data + b"a seal", "x", dcp.RECORDS)
    assert len(read["storage_data"]) == 7
    assert {index["fqn"] for index in read["storage_data"]} == {
        name for tensor in TENSORS for name in tensor.names
    }


def test_many_pieces_are_passed_on_in_parts() -> None:
    boxes = [Box((row,), (1,)) for row in range(5000)]
    tensors = [DcpTensor(["w"], (5000,), torch.float32, partial(iter, boxes), 1)]
    files = [("__0_0.distcp", (DcpPiece(0, box, 64 * n, 64) for n, box in enumerate(boxes)))]
    parts = [*pickle_metadata(tensors, files, by_part=False)]
    assert len(parts) > 2
    metadata = pickle.loads(b"".join(parts))
    assert len(metadata.storage_data) == len(metadata.state_dict_metadata["w"].chunks) == 5000
    assert metadata.planner_data == {"w": ("w",)}
