"""Checksums of blocks: what is read is verified as it is read, with little read beyond it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anyrank
from anyrank.errors import CorruptCheckpoint
from anyrank.files.block_sums import (
    BLOCK_BYTES,
    BlockDigester,
    BlockSums,
    check_file,
)
from anyrank.files.manifest import read_manifest
from anyrank.files.reader import Job, Reader
from anyrank.files.storage import LocalStorage
from anyrank.sources.step_listing import open_step
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.reads import plan_reads

SIZES = st.one_of(st.integers(0, 300), st.integers(0, 5 * BLOCK_BYTES))


def file_of(size: int, cuts: list[int]) -> tuple[bytes, BlockSums]:
    """A file and its checksums, fed in parts."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    digester, low = BlockDigester(), 0
    for high in [*sorted(cut % (size + 1) for cut in cuts), size]:
        digester.update(memoryview(data)[low:high])
        low = high
    return data, BlockSums(size, digester.finish())


@given(SIZES, st.lists(st.integers(0, 10**6), max_size=5), st.data())
def test_any_range_is_verified_by_whole_blocks(size: int, cuts: list[int], data: Any) -> None:
    content, sums = file_of(size, cuts)
    assert len(sums.digests) == -(-size // BLOCK_BYTES) * 8
    if not content:
        return
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    low, high = sums.around(start, stop)
    assert low <= start < stop <= high <= size
    assert start - low < BLOCK_BYTES
    assert high - stop < BLOCK_BYTES
    inner = data.draw(st.integers(low, high))
    views = [memoryview(content)[low:inner], memoryview(content)[inner:high]]
    sums.check(low, views, "x")
    changed = bytearray(content)
    changed[start] ^= 1
    first, end = sums.around(start, start + 1)
    with pytest.raises(
        CorruptCheckpoint, match=f"bytes {first} to {end} differ from the saved ones"
    ):
        sums.check(low, [memoryview(changed)[low:high]], "x")


@given(st.data(), st.integers(0, 3 * BLOCK_BYTES), st.integers(1, 4))
def test_parts_of_a_file_are_all_of_it(data: Any, size: int, count: int) -> None:
    content, sums = file_of(size, [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content)
        told: list[int] = []
        for number in range(count):
            check_file(str(path), sums, number, count, told.append)
        assert sum(told) == size
        if size:
            changed = bytearray(content)
            changed[data.draw(st.integers(0, size - 1))] ^= 1
            path.write_bytes(changed)
            found: list[int] = []
            for number in range(count):
                try:
                    check_file(str(path), sums, number, count, told.append)
                except CorruptCheckpoint:
                    found.append(number)
            assert len(found) == 1


def saved(path: Path, steps: int = 1) -> nn.Module:
    """A run with a parameter of 1 MiB."""
    torch.manual_seed(0)
    net = nn.Linear(512, 512)
    state = anyrank.TrainState(net)
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        for _ in range(steps):
            ckpts.step_done()
    return net


def read(path: Path, box: Box, destination: torch.Tensor) -> int:
    """Fill the destination with a part of the weight; bytes read."""
    storage, folder = LocalStorage(), str(path / "step-00000001")
    listing = open_step(storage, folder, read_manifest(storage, folder)).listing
    stored = listing.tensors["model.weight"]
    with Reader(listing, buffer_bytes=256 << 10, threads=2, verify=True) as reader:
        reader.open(range(len(listing.files)))
        reads = plan_reads(stored, [Piece(box, (0, 0))])
        reader.run([Job(one, one.view_of(destination)) for one in reads])
        return reader.bytes_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "box", [Box((0, 0), (512, 512)), Box((100, 0), (171, 512)), Box((3, 100), (300, 57))]
)
@pytest.mark.parametrize("strided", [False, True])
def test_parts_are_read_right_and_a_flipped_bit_in_them_is_noticed(
    tmp_path: Path, box: Box, dtype: torch.dtype, strided: bool
) -> None:
    net = saved(tmp_path)
    wanted = net.weight.detach()[box.slices()].to(dtype)  # type: ignore[union-attr]
    memory = torch.zeros(box.sizes[::-1], dtype=dtype).T if strided else torch.zeros(box.sizes)
    destination = memory if strided else memory.to(dtype)
    nbytes = read(tmp_path, box, destination)
    assert torch.equal(destination, wanted)
    if box.sizes[1] == 512 and dtype == torch.float32 and not strided:
        assert nbytes <= box.numel * 4 + 2 * BLOCK_BYTES * -(-box.numel * 4 // (256 << 10))
    data = tmp_path / "step-00000001" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    row = wanted[0].float().numpy() if dtype == torch.float32 else None
    place = content.find(row.tobytes()) if row is not None else len(content) // 3
    content[place + 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(anyrank.CorruptCheckpoint, match="The file is corrupt"):
        read(tmp_path, box, destination)


def test_a_state_whose_only_step_is_damaged_may_not_be_used(tmp_path: Path) -> None:
    saved(tmp_path)
    good = tmp_path / "good"
    shutil.copytree(tmp_path / "step-00000001", good)
    file = tmp_path / "step-00000001" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    state = anyrank.TrainState(nn.Linear(512, 512))
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        with pytest.raises(anyrank.CorruptCheckpoint, match="its only checkpoint is corrupt"):
            ckpts.resume()
        with pytest.raises(anyrank.CheckpointError, match="only partly restored"):
            ckpts.step_done()
        good.rename(tmp_path / "step-00000001")
        assert ckpts.resume() is not None
        ckpts.step_done()


def test_a_load_of_a_run_verifies_every_byte_when_asked(tmp_path: Path) -> None:
    saved(tmp_path)
    assert anyrank.load(nn.Linear(512, 512), tmp_path, verify=True).verified == (
        "replicas, xxh3-64 of 1 file"
    )
    file = tmp_path / "step-00000001" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(anyrank.LoadError, match="The file is corrupt"):
        anyrank.load(nn.Linear(512, 512), tmp_path, verify=True)
