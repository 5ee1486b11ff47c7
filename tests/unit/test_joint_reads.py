"""What ranks want of the same bytes is read once: who wants what is kept, each element once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.files.listing import FileInfo, Listing
from anyrank.filling.exchange import _windows  # pyright: ignore[reportPrivateUsage]
from anyrank.filling.strategy import caches_of, decide
from anyrank.tensors.box import Box, BoxIndex, row_major
from anyrank.tensors.layout import Layout, Piece, Placement, local_pieces
from anyrank.tensors.plan import joint_reads, wanted_rows
from anyrank.tensors.spec import Chunk, StoredTensor


def stored_as(shape: tuple[int, ...], order: list[int]) -> StoredTensor:
    """A tensor of int64 whose dims lie in a file in this order, the slowest first."""
    steps = row_major([shape[dim] for dim in order])
    strides = tuple(steps[order.index(dim)] for dim in range(len(shape)))
    return StoredTensor("w", shape, torch.int64, (Chunk(Box.whole(shape), 0, 0, strides),))


def shards(
    shape: tuple[int, ...], dim: int, ranks: int
) -> dict[tuple[Piece, ...], tuple[int, ...]]:
    layout = Layout((ranks,), (Placement("shard", dim),))
    pieces = {local_pieces(shape, layout, (rank,)): (rank,) for rank in range(ranks)}
    return {some: who for some, who in pieces.items() if some}


@settings(deadline=None)
@given(data=st.data())
def test_each_rank_gets_its_elements_once_and_near_bytes_are_read_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    dim, ranks = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    gap, most = data.draw(st.sampled_from([0, 16, 1 << 20])), data.draw(st.integers(8, 400))
    groups = shards(shape, dim, ranks)
    seen = {rank: torch.zeros(shape, dtype=torch.int64) for rank in range(ranks)}
    times = torch.zeros(shape, dtype=torch.int64)
    for joint in joint_reads(stored_as(shape, order), groups, gap):
        for block in joint.cut(most):
            assert block.read.nbytes <= max(8, most)
            times[block.read.box.slices()] += 1
            for part, who in block.parts:
                assert part.box.intersect(block.read.box) == part.box
                for rank in who:
                    seen[rank][part.box.slices()] += 1
    for pieces, (rank,) in groups.items():
        wanted = torch.zeros(shape, dtype=torch.int64)
        for piece in pieces:
            wanted[piece.box.slices()] += 1
        assert torch.equal(seen[rank], wanted)
    assert bool((times == 1).all())


def test_columns_are_one_read_and_rows_are_one_each() -> None:
    stored = stored_as((64, 64), [0, 1])
    (columns,) = joint_reads(stored, shards((64, 64), 1, 4))
    assert (columns.read.box, columns.takers) == (Box.whole((64, 64)), (0, 1, 2, 3))
    rows = joint_reads(stored, shards((64, 64), 0, 4))
    assert [(joint.takers, joint.is_whole) for joint in rows] == [((n,), True) for n in range(4)]
    transposed = joint_reads(stored_as((64, 64), [1, 0]), shards((64, 64), 0, 4))
    assert [joint.takers for joint in transposed] == [(0, 1, 2, 3)]


def test_long_runs_are_read_by_those_who_want_them() -> None:
    shape = (4, 4, 1 << 14)  # runs of 128 KiB, and as long holes between them
    joint = joint_reads(stored_as(shape, [0, 1, 2]), shards(shape, 1, 4))
    assert [some.takers for some in joint] == [(0,), (1,), (2,), (3,)]
    assert sum(some.read.nbytes for some in joint) == 8 * math.prod(shape)


def rows_on(ranks: int) -> tuple[Box, ...]:
    layout = Layout((ranks,), (Placement("shard", 0),))
    return tuple(local_pieces((8192, 64), layout, (rank,))[0].box for rank in range(ranks))


@pytest.mark.parametrize("dim", [0, 1])
def test_planning_takes_as_many_steps_as_there_are_ranks_and_chunks(monkeypatch, dim) -> None:
    # Saved on 512 ranks, wanted on 256: compared each with each, these would be 131,072 steps.
    chunks = tuple(Chunk(box, n, 0, (64, 1)) for n, box in enumerate(rows_on(512)))
    stored = StoredTensor("w", (8192, 64), torch.int64, chunks)
    groups = shards((8192, 64), dim, 256)
    asked: list[Box] = []
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda a, b: asked.append(a) or intersect(a, b))
    assert sum(nbytes for nbytes, _ in wanted_rows(stored, groups)) == stored.nbytes
    assert not asked
    if dim == 0:
        assert len(joint_reads(stored, groups)) == 512
        assert len(asked) <= 256 + 512


@settings(deadline=None)
@given(data=st.data())
def test_what_ranks_would_all_read_is_known_without_the_chunks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    dim, gap = (
        data.draw(st.integers(0, len(shape) - 1)),
        data.draw(st.sampled_from([0, 16, 1 << 20])),
    )
    stored, groups = stored_as(shape, order), shards(shape, dim, data.draw(st.integers(1, 4)))
    joint = {(each.read.nbytes, each.takers) for each in joint_reads(stored, groups, gap)}
    assert set(wanted_rows(stored, groups, gap)) == joint


@settings(deadline=None)
@given(data=st.data())
def test_boxes_in_common_are_found_as_by_comparing_each(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 3))
    sides = st.tuples(*[st.tuples(st.integers(0, 9), st.integers(1, 5))] * dims)
    boxes = [
        Box(*map(tuple, zip(*each, strict=True))) if each else Box((), ())
        for each in data.draw(st.lists(sides, min_size=1, max_size=9))
    ]
    wanted, *held = boxes
    every = {(n, both) for n, box in enumerate(held) if (both := wanted.intersect(box))}
    assert set(BoxIndex(held).common(wanted)) == every


def test_what_no_page_cache_holds_is_read_by_one_rank_and_exchanged() -> None:
    def decided(path: str, repeated: int) -> tuple[str, str]:
        listing = Listing("safetensors", (FileInfo(path, 1, ""),), {})
        caches = caches_of(range(4), [0] * 4, listing)
        decision = decide("auto", range(4), caches, [True] * 4, repeated)
        return decision.name, decision.reason

    assert decided("/data/w.safetensors", 1 << 30)[0] == "own"
    assert decided("s3://b/w.safetensors", 1 << 30) == ("stripe", "ranks would read 1.0 GiB alike")
    assert decided("s3://b/w.safetensors", 1 << 20)[0] == "own"


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_a_window_stages_no_more_than_it_may_or_is_one_transfer(sizes, most) -> None:
    transfers: Any = [SimpleNamespace(staged_bytes=size) for size in sizes]
    windows = [[each.staged_bytes for each in window] for window in _windows(transfers, most)]
    assert [size for window in windows for size in window] == sizes
    assert all(window and (sum(window) <= most or len(window) == 1) for window in windows)
