"""Columns of a matrix are read run by run: the right elements, and no bytes between them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anyrank.files.reader import Job, Reader
from anyrank.formats.sources import list_source
from anyrank.tensors import plan
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.plan import Read, plan_reads, runs_of
from anyrank.tensors.spec import Chunk, StoredTensor


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_are_the_elements_of_a_box_in_order(
    data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "HOLE_BYTES", 8)  # one element
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    steps = row_major([shape[dim] for dim in order])
    strides = tuple(steps[order.index(dim)] for dim in range(len(shape)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        data.draw(st.integers(1, size - low)) for size, low in zip(shape, offsets, strict=True)
    )
    chunk = Chunk(Box.whole(shape), 0, 0, strides)
    stored = StoredTensor("w", shape, torch.int64, (chunk,))
    box = Box(offsets, sizes)
    runs = runs_of(Read(stored, chunk, box, (0,) * len(shape)))
    in_file = torch.arange(math.prod(shape))
    wanted = in_file.as_strided(shape, strides)[box.slices()].reshape(-1)
    if runs is None:
        return
    assert runs.step_bytes - runs.nbytes >= 8
    found = [
        in_file[(runs.start + n * runs.step_bytes) // 8 :][: runs.nbytes // 8]
        for n in range(runs.count)
    ]
    assert torch.equal(torch.cat(found), wanted)


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


def test_short_holes_are_read_through(tmp_path: Path) -> None:
    weight = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    listing = list_source(str(tmp_path / "w.safetensors"))
    with Reader(listing, buffer_bytes=1 << 20) as reader:
        assert torch.equal(reader.read(listing.tensors["w"], Box((0, 0), (64, 8))), weight[:, :8])
        assert reader.bytes_read > 4 * weight[:, :8].numel()
