"""Promise 2, as arithmetic: over shapes, placements and rank counts every element is read exactly
once.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.errors import LoadError
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Layout, Placement, local_pieces, local_shape
from anyrank.tensors.reads import blocks, cut_dense, plan_reads
from anyrank.tensors.spec import Chunk, StoredTensor

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements = []
    for axis in range(len(mesh)):
        if ndim == 0 or draw(st.booleans()):
            placements.append(Placement("replicate"))
        else:
            later = math.prod(mesh[axis + 1 :])
            factor = draw(st.sampled_from([1, later, 2]))
            placements.append(Placement("shard", draw(st.integers(0, ndim - 1)), factor))
    return Layout(mesh, tuple(placements))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = draw(shapes)
    return shape, draw(layouts(len(shape)))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_the_ranks_pieces_tile_the_tensor(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    copies = math.prod(
        n
        for n, p in zip(layout.mesh_shape, layout.placements, strict=True)
        if p.kind == "replicate"
    )
    counts = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        pieces = local_pieces(shape, layout, coordinate)
        local = torch.zeros(local_shape(shape, layout, coordinate), dtype=torch.int64)
        for piece in pieces:
            counts[piece.box.slices()] += 1
            local[Box(piece.local, piece.box.sizes).slices()] += 1
        assert bool((local == 1).all()), "the pieces do not tile the local tensor"
    assert bool((counts == copies).all())


@st.composite
def stored_tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[StoredTensor, torch.Tensor]:
    """A tensor cut into chunks at rest, each with its own offset and dim order, and the bytes."""
    values = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape) + 1
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
    data, chunks = torch.zeros(0, dtype=torch.int16), []
    for chosen in itertools.product(*spans):
        box = Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
        if not box.numel:
            continue
        order = draw(st.permutations(range(len(shape))))
        part = values[box.slices()].permute(order).contiguous()
        strides = row_major(part.shape)
        by_dim = tuple(strides[order.index(d)] for d in range(len(shape)))
        gap = draw(st.integers(0, 3))
        chunks.append(Chunk(box, 0, 2 * (len(data) + gap), by_dim))
        data = torch.cat([data, torch.zeros(gap, dtype=torch.int16), part.reshape(-1)])
    return StoredTensor("t", shape, torch.int16, tuple(chunks)), data


@given(cases().flatmap(lambda c: st.tuples(st.just(c), stored_tensors(c[0]), st.integers(2, 64))))
@settings(max_examples=300, deadline=None)
def test_every_wanted_element_is_read_exactly_once(case: object) -> None:
    (shape, layout), (stored, data), most = case  # type: ignore[misc]
    values = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape) + 1
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        pieces = local_pieces(shape, layout, coordinate)
        local = torch.zeros(local_shape(shape, layout, coordinate), dtype=torch.int16)
        written = torch.zeros_like(local)
        for read in plan_reads(stored, pieces):
            for block in blocks(read, most):
                for small in cut_dense(block, most) if block.dense else [block]:
                    assert small.stop - small.start <= max(most, 2)
                    view = data.as_strided(small.read.box.sizes, small.strides, small.start // 2)
                    small.read.view_of(local).copy_(view)
                    small.read.view_of(written).add_(1)
        assert bool((written == 1).all())
        for piece in pieces:
            inside = Box(piece.local, piece.box.sizes).slices()
            assert torch.equal(local[inside], values[piece.box.slices()])


def test_a_hole_between_chunks_is_an_error() -> None:
    whole = Box.whole((4, 2))
    half = Chunk(Box((0, 0), (2, 2)), 0, 0, (2, 1))
    stored = StoredTensor("layer.weight", (4, 2), torch.float32, (half,))
    pieces = local_pieces((4, 2), None, None)
    assert pieces[0].box == whole
    with pytest.raises(
        LoadError, match=r"layer.weight: the chunks in the source hold 4 of the 8 elements"
    ):
        plan_reads(stored, pieces)


@pytest.mark.parametrize(
    ("rows", "mesh", "coordinate", "wanted"),
    [
        # FSDP cuts what tensor parallelism has left: rows 5..8 belong to the second TP rank.
        (9, (4, 2), (0, 1), [(5, 1)]),
        (9, (4, 2), (3, 0), []),
        (8, (2, 2), (1, 0), [(2, 2)]),
    ],
)
def test_fsdp_over_tensor_parallel_cuts_tp_first(
    rows: int, mesh: tuple[int, int], coordinate: tuple[int, int], wanted: list[tuple[int, int]]
) -> None:
    layout = Layout(mesh, (Placement("shard", 0, mesh[1]), Placement("shard", 0)))
    pieces = local_pieces((rows, 3), layout, coordinate)
    assert [(piece.box.offsets[0], piece.box.sizes[0]) for piece in pieces] == wanted


def test_a_strided_shard_alone_has_several_pieces() -> None:
    layout = Layout((2,), (Placement("shard", 0, 3),))
    pieces = local_pieces((12,), layout, (1,))
    assert [(p.box.offsets[0], p.box.sizes[0], p.local[0]) for p in pieces] == [
        (2, 2, 0),
        (6, 2, 2),
        (10, 2, 4),
    ]
