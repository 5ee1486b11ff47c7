"""Who writes what: each element once, and no rank more than the optimum and one lot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.tensors import writes
from anyrank.tensors.box import Box
from anyrank.tensors.layout import GIVEN_BOXES, IntervalShard, Layout, Placement
from anyrank.tensors.spread import Spread
from anyrank.tensors.writes import PlannedTensor, WritePlan

LOT = 64
R, S0, S1 = Placement("replicate"), Placement("shard", 0), Placement("shard", 1)
SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def small_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "PIECE_BYTES", LOT)
    monkeypatch.setattr(writes, "MIN_LOT_BYTES", LOT // 4)


def on_mesh(mesh: Sequence[int], *placements: Placement, size: int = 0) -> Spread:
    """Tensors of one layout on a mesh of the first ranks, of `size`."""
    coordinates = [*itertools.product(*map(range, mesh))]
    outside = [None] * max(0, size - len(coordinates))
    return Spread(Layout(tuple(mesh), placements), [*coordinates, *outside])


def plain(size: int) -> Spread:
    return Spread(None, [()] * size)


def spreads_of(kind: str, size: int) -> list[Spread]:
    """How the tensors of a model lie on so many ranks."""
    inner = next(n for n in (4, 3, 2, 1) if size % n == 0)
    outer = size // inner
    return {
        "ddp": [plain(size)],
        "fsdp": [on_mesh([size], S0), plain(size)],
        "hsdp": [on_mesh([outer, inner], R, S0), plain(size)],
        "wide hsdp": [on_mesh([inner, outer], R, S0), plain(size)],
        "tp x fsdp": [
            on_mesh([outer, inner], S0, S1),
            on_mesh([outer, inner], S0, R),
            on_mesh([outer, inner], R, S1),
            plain(size),
        ],
        "tp over fsdp": [
            on_mesh([outer, inner], Placement("shard", 0, inner), S0),
            on_mesh([outer, inner], R, R),
        ],
        "a part of the ranks": [on_mesh([inner], S0, size=size), on_mesh([1], R, size=size)],
    }[kind]


def plan_of(kind: str, size: int, shapes: Sequence[tuple[int, ...]], first: bool) -> WritePlan:
    spreads = itertools.cycle(spreads_of(kind, size))
    tensors = [PlannedTensor(shape, 4, spread) for shape, spread in zip(shapes, spreads)]  # noqa: B905
    if first:
        tensors.append(PlannedTensor((9, 9), 4, plain(size), may_differ=True))
    return WritePlan(tensors, size)


def check_each_element_once(plan: WritePlan) -> list[int]:
    """Each element is written once, by a rank that holds it; returns the bytes of each rank."""
    times = [torch.zeros(tensor.shape) for tensor in plan.tensors]
    load = [0] * plan.size
    wrote: dict[int, set[int]] = {}
    for rank in range(plan.size):
        for number, piece in plan.writes_of(rank):
            tensor = plan.tensors[number]
            times[number][piece.box.slices()] += 1
            load[rank] += piece.box.numel * tensor.itemsize
            wrote.setdefault(number, set()).add(rank)
            assert piece.box.numel * tensor.itemsize <= max(LOT, tensor.itemsize)
            if piece.box.numel:
                spot = tensor.spread.spot(rank)
                assert spot is not None
                held = tensor.spread.pieces(tensor.shape, spot)
                assert any(own.box.intersect(piece.box) == piece.box for own in held)
                assert rank in tensor.spread.meeting(tensor.shape, piece.box)
    for number, tensor in enumerate(plan.tensors):
        assert bool((times[number] == 1).all()), number
        assert plan.writers(number) == sorted(wrote[number])
        assert not tensor.may_differ or wrote[number] == {0}
    return load


def optimum(plan: WritePlan) -> float:
    """No plan can have less on its fullest rank: the mean of what some ranks alone can write."""
    jobs: list[tuple[frozenset[int], int]] = []
    for tensor in plan.tensors:
        for spot, members in tensor.spread.members.items():
            nbytes = sum(p.box.numel for p in tensor.spread.pieces(tensor.shape, spot)) * 4
            jobs.append((frozenset(members[:1] if tensor.may_differ else members), nbytes))
    sets = {members for members, _ in jobs} | {frozenset(range(plan.size))}
    return max(sum(n for who, n in jobs if who <= some) / len(some) for some in sets)


KINDS = ["ddp", "fsdp", "hsdp", "wide hsdp", "tp x fsdp", "tp over fsdp", "a part of the ranks"]


@pytest.mark.parametrize("kind", KINDS)
@given(shapes=SHAPES, size=st.integers(1, 64), first=st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_element_is_written_once_and_no_rank_writes_too_much(
    kind: str, shapes: list[tuple[int, int]], size: int, first: bool
) -> None:
    plan = plan_of(kind, size, shapes, first)
    # Where sets of holders overlap, the best plan has more than `optimum`, which takes each alone.
    assert max(check_each_element_once(plan)) <= optimum(plan) + 1.5 * LOT


@given(shapes=SHAPES, size=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_that_say_their_boxes_are_written_once(
    shapes: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    tensors: list[PlannedTensor] = []
    for shape in shapes:
        coordinates: list[tuple[int, ...] | None] = []
        rows = iter(range(shape[0]))
        for rank in range(size):
            own = [*itertools.islice(rows, data.draw(st.integers(0, shape[0])))]
            own = [*own, *rows] if rank == size - 1 else own
            boxes = [n for row in own[:1] for n in (row, 0, 0, 0, len(own), shape[1])]
            coordinates.append((0, 0, *boxes))
        tensors.append(PlannedTensor(shape, 4, Spread(GIVEN_BOXES, coordinates)))
    check_each_element_once(WritePlan(tensors, size))


def test_intervals_are_written_once() -> None:
    parts = (((0, 3), (8, 2)), ((3, 5),))
    spread = on_mesh([2, 2], R, IntervalShard("shard", 0, intervals=parts))
    check_each_element_once(WritePlan([PlannedTensor((10, 3), 4, spread)], 4))


def boxes_of(shape: Sequence[int]) -> Iterator[Box]:
    for offsets in itertools.product(*(range(0, size, 3) for size in shape)):
        sizes = [min(4, size - low) for low, size in zip(offsets, shape, strict=True)]
        yield Box(offsets, tuple(sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 6, 8, 12])
def test_who_holds_a_box_is_found_without_asking_each_rank(kind: str, size: int) -> None:
    for spread in spreads_of(kind, size):
        for box in boxes_of((7, 5)):
            expected = {
                rank
                for spot, members in spread.members.items()
                for rank in members
                if any(piece.box.intersect(box) for piece in spread.pieces((7, 5), spot))
            }
            assert spread.meeting((7, 5), box) == expected


def test_small_tensors_that_all_hold_are_one_ranks() -> None:
    spread = plain(32)
    tensors = [PlannedTensor((), 4, spread) for _ in range(4)]
    plan = WritePlan(tensors, 32)
    assert {rank for number in range(4) for rank in plan.writers(number)} == {0}
