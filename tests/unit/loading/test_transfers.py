"""The plan of a sync: over random layouts, every wanted element is received exactly once, from a
rank that has it, and no element crosses that need not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.errors import LoadError
from anyrank.loading.sharing.transfers import Strip, Transfer, places_of, strips_of, transfers_of
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import (
    IntervalShard,
    Layout,
    Piece,
    Placement,
    local_pieces,
    local_shape,
)
from anyrank.tensors.spec import Chunk, StoredTensor

Side = tuple[Layout | None, dict[int, tuple[int, ...] | None]]


def intervals(draw: Any, size: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """A dim cut anywhere, each interval given to any place of an axis, in any order."""
    inner = draw(st.lists(st.integers(0, size), max_size=4, unique=True))
    cuts = sorted({0, size, *inner})
    places: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for start, stop in draw(st.permutations(list(itertools.pairwise(cuts)))):
        places[draw(st.integers(0, count - 1))].append((start, stop - start))
    return tuple(map(tuple, places))


@st.composite
def sides(draw: Any, sizes: tuple[int, ...], ranks: int) -> Side:
    """A layout of a tensor on some of the ranks, in some order."""
    ndim = len(sizes)
    if draw(st.booleans()) and draw(st.booleans()):
        whole = draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
        return None, dict.fromkeys(whole, None)
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    size = 1
    for n in shape:
        size *= n
    if size > ranks:
        shape, size = (ranks,), ranks
    dims = st.integers(-1, ndim - 1)
    drawn = draw(st.lists(dims, min_size=len(shape), max_size=len(shape)))
    placements = [Placement("shard", d) if d >= 0 else Placement("replicate") for d in drawn]
    if drawn[0] >= 0 and (len(drawn) == 1 or drawn[0] != drawn[1]) and draw(st.booleans()):
        given = intervals(draw, sizes[drawn[0]], shape[0])
        placements[0] = IntervalShard("shard", drawn[0], intervals=given)
    elif drawn[0] >= 0 and draw(st.booleans()):  # by any factor, as FSDP over tensor parallelism
        placements[0] = Placement("shard", drawn[0], draw(st.integers(2, 4)))
    order = draw(st.permutations(range(ranks)))
    at = list(itertools.product(*map(range, shape)))
    outside = {rank: None for rank in order[size:] if draw(st.booleans())}
    return Layout(shape, tuple(placements)), {**dict(zip(order, at, strict=False)), **outside}


def local_of(full: torch.Tensor, side: Side, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor."""
    layout, at = side
    coordinate = at[rank]
    local = torch.full(local_shape(full.shape, layout, coordinate), -1, dtype=full.dtype)
    for piece in local_pieces(full.shape, layout, coordinate):
        local[Box(piece.local, piece.box.sizes).slices()] = full[piece.box.slices()]
    return local


def pieces_of(shape: tuple[int, ...], side: Side) -> dict[int, tuple[Piece, ...]]:
    return {rank: local_pieces(shape, side[0], at) for rank, at in sorted(side[1].items())}


def plans_of(
    shape: tuple[int, ...], src: Side, dst: Side, ranks: int, nodes: Mapping[int, int]
) -> dict[int, list[Transfer]]:
    """Each rank's own transfers."""
    strip = Strip(Box.whole(shape), 0, (0,) * len(shape), tuple(range(len(shape))))
    places = places_of(shape, *src, nodes)
    wanted = pieces_of(shape, dst)
    return {rank: transfers_of(rank, [strip], [places], wanted) for rank in range(ranks)}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_wanted_element_arrives_once_from_a_rank_that_has_it(data: Any) -> None:
    ranks = data.draw(st.integers(1, 7))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    src, dst = (data.draw(sides(shape, ranks)) for _ in range(2))
    nodes = {rank: rank // data.draw(st.integers(1, 4)) for rank in range(ranks)}
    full = torch.arange(Box.whole(shape).numel).reshape(shape)
    plans = plans_of(shape, src, dst, ranks, nodes)
    sources = {rank: local_of(full, src, rank) for rank in src[1]}
    targets = {rank: torch.full_like(local_of(full, dst, rank), -2) for rank in dst[1]}
    counts = {rank: torch.zeros_like(target) for rank, target in targets.items()}
    for rank, plan in plans.items():
        for t in plan:
            assert rank in (t.sender, t.receiver)
            if rank != t.receiver:
                assert t in plans[t.receiver]  # both ends come to the same transfer by themselves
                continue
            assert t in plans[t.sender]
            into = Box(t.target, t.box.sizes).slices()
            out_of = Box(t.source, t.box.sizes).slices()
            targets[rank][into] = sources[t.sender][out_of]
            counts[rank][into] += 1
            has_it = {p.box for p in pieces_of(shape, src).get(rank, ())}
            mine = [box for box in has_it if t.box.intersect(box)]
            assert t.sender == rank or not mine  # nothing crosses that need not
            near = [r for r in src[1] if nodes[r] == nodes[rank]]
            if t.sender != rank and nodes[t.sender] != nodes[rank]:
                held = [p.box.intersect(t.box) for r in near for p in pieces_of(shape, src)[r]]
                assert not any(held)  # a node's own holder is preferred
    for rank, target in targets.items():
        assert torch.equal(target, local_of(full, dst, rank))
        assert bool((counts[rank] == 1).all())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_all_ranks_have_one_order(data: Any) -> None:
    """Two ranks list what passes between them alike, and no ranks wait in a circle."""
    ranks = data.draw(st.integers(2, 6))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    src, dst = (data.draw(sides(shape, ranks)) for _ in range(2))
    plans = plans_of(shape, src, dst, ranks, dict.fromkeys(range(ranks), 0))
    left = {rank: [t for t in plan if t.sender != t.receiver] for rank, plan in plans.items()}
    while any(left.values()):
        first = [rank for rank, plan in left.items() if plan and plan[0] in _heads(left, plan[0])]
        assert first, "no transfer is the next one of both its ranks"
        t = left[first[0]][0]
        left[t.sender].pop(0)
        left[t.receiver].pop(0)


def _heads(left: dict[int, list[Transfer]], t: Transfer) -> list[Transfer]:
    """The transfer, if it is the next one at both ends."""
    ends = (left[t.sender], left[t.receiver])
    return [t] if all(plan and plan[0] == t for plan in ends) else []


def test_replicas_send_about_as_much_each() -> None:
    shape = (256, 1024)
    src: Side = (None, dict.fromkeys(range(3), None))
    dst: Side = (Layout((5,), (Placement("shard", 0),)), {3 + n: (n,) for n in range(5)})
    sent = dict.fromkeys(range(3), 0)
    for rank, plan in plans_of(shape, src, dst, 8, dict.fromkeys(range(8), 0)).items():
        for t in plan:
            sent[t.sender] += t.box.numel if t.sender == rank else 0
    assert max(sent.values()) <= 1.1 * 256 * 1024 / 3


@pytest.mark.parametrize(
    ("replicas", "outer", "inner"),
    [
        (1, Placement("replicate"), Placement("shard", 1)),
        (4, Placement("replicate"), Placement("shard", 1)),
        # FSDP over tensor parallelism cuts what is left of the rows.
        (4, Placement("shard", 0, 8), Placement("shard", 0)),
    ],
)
def test_many_ranks_send_and_receive_about_as_much_each(
    replicas: int, outer: Placement, inner: Placement
) -> None:
    senders, receivers, shape = 64, 32, (2051 if outer == Placement("replicate") else 2048, 512)
    mesh = (replicas, senders // replicas)
    rows, whole = Placement("shard", 0), Placement("replicate")
    at = dict(enumerate(itertools.product(*map(range, mesh))))
    src: Side = (Layout(mesh, (whole, rows)), at)
    to_mesh = dict(enumerate(itertools.product(range(4), range(8)), senders))
    dst: Side = (Layout((4, 8), (outer, inner)), to_mesh)
    nodes = {rank: rank // 8 for rank in range(senders + receivers)}
    sent, received = dict.fromkeys(at, 0), dict.fromkeys(to_mesh, 0)
    strip = Strip(Box.whole(shape), 0, (0, 0), (0, 1))
    places, wanted = places_of(shape, *src, nodes), pieces_of(shape, dst)
    for receiver in to_mesh:
        for t in transfers_of(receiver, [strip], [places], wanted):
            sent[t.sender] += t.box.numel
            received[receiver] += t.box.numel
    total = shape[0] * shape[1] * (4 if outer == whole else 1)
    assert sum(sent.values()) == total
    assert max(sent.values()) <= 1.1 * total / senders
    assert max(received.values()) == total / receivers


def test_what_nobody_holds_is_named() -> None:
    layout = Layout((2,), (Placement("shard", 0),))
    with pytest.raises(LoadError, match=r"the source's ranks hold only 2 of the 4 elements"):
        plans_of((4,), (layout, {0: (0,)}), (None, {1: None}), 2, {0: 0, 1: 0})


@pytest.mark.parametrize(
    ("dst", "view"),
    [
        ((4, 6), lambda t: t.reshape(24, 5)[3:7].reshape(4, 5)),
        ((2, 3, 4, 5), lambda t: t),
        ((5, 24), lambda t: t.reshape(24, 5).t()),
        ((24, 5), lambda t: t.reshape(24, 5)),
        ((3, 2, 20), lambda t: t.reshape(2, 3, 20).transpose(0, 1)),
        ((1, 2, 5), lambda t: t[1, 2, 1:3].unsqueeze(0)),
    ],
)
def test_a_view_of_a_source_is_found_in_its_dims(dst: Any, view: Any) -> None:
    full = torch.arange(120).reshape(2, 3, 4, 5)
    seen = view(full)
    chunk = Chunk(Box.whole(seen.shape), 0, seen.storage_offset() * 8, seen.stride())
    stored = StoredTensor("x", tuple(seen.shape), torch.int64, (chunk,))
    made = torch.full(seen.shape, -1)
    for strip in strips_of(stored, [tuple(full.shape)]):
        inside = strip.to_source(strip.box)
        assert strip.to_wanted(inside) == strip.box
        part = full[inside.slices()]
        order = [d for d in strip.dims if d >= 0]
        rest = [d for d in range(4) if d not in order]
        made[strip.box.slices()] = part.permute(order + rest).reshape(strip.box.sizes)
    assert torch.equal(made, seen)


def test_a_view_across_dims_is_refused() -> None:
    chunk = Chunk(Box.whole((3,)), 0, 0, (6,))  # a diagonal
    stored = StoredTensor("x", (3,), torch.float32, (chunk,))
    assert row_major((3, 5)) == (5, 1)
    with pytest.raises(LoadError, match="across the dims of the source"):
        strips_of(stored, [(3, 5)])


def test_layouts_that_differ_have_other_words() -> None:
    rows, strided = Placement("shard", 0), Placement("shard", 0, 2)
    halves = IntervalShard("shard", 0, intervals=(((0, 2), (4, 2)), ((2, 2), (6, 2))))
    layouts = [
        Layout((2,), (rows,)),
        Layout((4,), (rows,)),
        Layout((2,), (strided,)),
        Layout((2,), (Placement("shard", 1),)),
        Layout((2,), (Placement("replicate"),)),
        Layout((2,), (halves,)),
        Layout((2, 4), (Placement("replicate"), rows)),
    ]
    assert str(layouts[-1]) == "R,S0 on 2x4"
    assert len(set(map(str, layouts))) == len(layouts)
