"""Columns of a matrix are copied out of a mapping: the right elements, and none between them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import anyrank
from anyrank.files import segments
from anyrank.files.listing import FileInfo, Listing
from anyrank.files.local import LocalFile
from anyrank.files.reader import Job, Reader
from anyrank.files.storage import storage_for
from anyrank.sources.source import list_source
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.reads import plan_reads
from anyrank.tensors.spec import Chunk, StoredTensor


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_of_any_order_is_read(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "GAP_BYTES", data.draw(st.sampled_from([0, 64 << 10])))
    if data.draw(st.booleans()):  # as on a file system that maps nothing
        monkeypatch.setattr(LocalFile, "mapped", lambda *_: None)
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    steps = row_major([shape[dim] for dim in order])
    strides = tuple(steps[order.index(dim)] for dim in range(len(shape)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        data.draw(st.integers(1, size - low)) for size, low in zip(shape, offsets, strict=True)
    )
    start = data.draw(st.sampled_from([0, 3, 8, 4096 + 16]))
    in_file = torch.arange(math.prod(shape), dtype=torch.int64)
    path = tmp_path / "file"
    path.write_bytes(bytes(start) + in_file.numpy().tobytes())
    stored = StoredTensor("w", shape, torch.int64, (Chunk(Box.whole(shape), 0, start, strides),))
    info = storage_for(str(path)).find(str(path))
    assert isinstance(info, FileInfo)
    box = Box(offsets, sizes)
    with Reader(Listing("raw", (info,), {"w": stored}), buffer_bytes=1 << 20) as reader:
        assert torch.equal(
            reader.read(stored, box), in_file.as_strided(shape, strides)[box.slices()]
        )


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("buffer_bytes", [16 << 10, 1 << 20])
def test_columns_take_their_own_bytes(tmp_path: Path, held: torch.dtype, buffer_bytes: int) -> None:
    weight = torch.arange(3 * 5 * 4096, dtype=torch.float32).reshape(3, 5, 4096)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    listing = list_source(str(tmp_path / "w.safetensors"))
    box = Box((1, 0, 512), (2, 5, 1024))  # 10 runs of 4 KiB, and holes of 12 KiB
    memory = torch.zeros(box.sizes, dtype=held)
    with Reader(listing, buffer_bytes=buffer_bytes) as reader:
        (read,) = plan_reads(listing.tensors["w"], [Piece(box, (0, 0, 0))])
        reader.open([0])
        reader.run([Job(read, memory)])
        assert reader.bytes_read == 2 * 5 * 1024 * 4
    assert torch.equal(memory, weight[box.slices()].to(held))


def test_a_short_tensor_is_read_with_its_holes(tmp_path: Path) -> None:
    weight = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    listing = list_source(str(tmp_path / "w.safetensors"))
    with Reader(listing, buffer_bytes=1 << 20) as reader:
        assert torch.equal(reader.read(listing.tensors["w"], Box((0, 0), (64, 8))), weight[:, :8])
        assert reader.bytes_read > 4 * weight[:, :8].numel()


def test_a_file_that_was_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    weight = torch.ones(1024, 1024)
    path = tmp_path / "w.safetensors"
    save_file({"w": weight}, path)
    listing = list_source(str(path))
    box = Box((0, 0), (1024, 8))
    memory = torch.zeros(box.sizes)
    (read,) = plan_reads(listing.tensors["w"], [Piece(box, (0, 0))])
    with Reader(listing, buffer_bytes=1 << 20) as reader:
        reader.open([0])
        with path.open("r+b") as file:
            file.truncate(1 << 20)
        with pytest.raises(anyrank.LoadError, match=r"too early\. The file is truncated"):
            reader.run([Job(read, memory)])
