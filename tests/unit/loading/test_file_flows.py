"""What ranks want of the same bytes is read once: who wants what is kept, each element once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.files.listing import FileInfo, Listing
from anyrank.loading.reading import caches_of, why_own
from anyrank.loading.sharing.decision import decide
from anyrank.loading.sharing.flows import FileFlows, Wanted
from anyrank.loading.sharing.shared_reads import in_one_chunk, shared_reads
from anyrank.tensors.box import Box, BoxIndex, row_major
from anyrank.tensors.layout import Layout, Piece, Placement, local_pieces
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor
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


def flows_of(
    stored: StoredTensor, layout: Layout, readers: tuple[int, ...] | None, stage_bytes: int
) -> FileFlows:
    """Of a tensor and its twin, each on as many ranks as the layout's first axis has places."""
    ranks = range(math.prod(layout.mesh_shape))
    at = {rank: tuple(divmod(rank, layout.mesh_shape[1])) for rank in ranks}
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    held = ShardedTensor("w", tensor, stored.shape, layout, at[0])
    return FileFlows(
        wanted=[Wanted(0, held, stored), Wanted(0, held, stored)],
        listing=Listing("safetensors", (FileInfo("w", 1, ""),), {}),
        coordinates={rank: Coordinates((place,), (0,)) for rank, place in at.items()},
        nodes=dict.fromkeys(ranks, 0),
        reading_ranks=readers,
        stage_bytes=stage_bytes,
    )


@given(data=st.data())
def test_each_rank_gets_its_elements_once_and_each_byte_is_read_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    dims = st.integers(-1, len(shape) - 1)
    cut = [data.draw(dims), data.draw(dims)]
    placements = [Placement("shard", dim) if dim >= 0 else Placement("replicate") for dim in cut]
    layout = Layout((data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))), (*placements,))
    size = math.prod(layout.mesh_shape)
    readers = data.draw(st.sampled_from([None, (0,), tuple(range(size))]))
    stage = data.draw(st.integers(1, 400))
    stored = stored_as(shape, order)
    flows = flows_of(stored, layout, readers, stage)
    values = torch.arange(math.prod(shape)).reshape(shape)
    every = [list(flows.rounds(rank)) for rank in range(size)]
    assert len({len(rounds) for rounds in every}) == 1
    sent: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    times = torch.zeros((2, *shape), dtype=torch.int64)
    for rank, rounds in enumerate(every):
        for flow in (flow for run in rounds for flow in run):
            for read in flow.reads.values():
                times[(flow.index, *read.box.slices())] += 1
            for transfer in flow.transfers:
                if transfer.sender == rank:
                    block = values[flow.reads[transfer.box_number].box.slices()]
                    part = block[Box(transfer.source, transfer.box.sizes).slices()]
                    sent.setdefault((flow.index, rank, transfer.receiver), []).append(part)
    if any(dim >= 0 for dim in cut):  # replicas alone may leave ranks with nothing
        assert bool((times == 1).all())
    for rank, rounds in enumerate(every):
        pieces = local_pieces(shape, layout, divmod(rank, layout.mesh_shape[1]))
        wanted = torch.full(shape, -1, dtype=torch.int64)
        for piece in pieces:
            wanted[piece.box.slices()] = values[piece.box.slices()]
        got = torch.full((2, *shape), -1, dtype=torch.int64)
        for flow in (flow for run in rounds for flow in run):
            for transfer in flow.transfers:
                if transfer.receiver == rank:
                    place = (flow.index, *transfer.box.slices())
                    assert bool((got[place] == -1).all())
                    got[place] = sent[flow.index, transfer.sender, rank].pop(0)
        assert torch.equal(got, torch.stack([wanted, wanted]))


@given(data=st.data())
def test_a_rank_stages_no_more_in_a_round_than_it_may(data: st.DataObject) -> None:
    ranks, readers = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, (0,)]))
    stage = data.draw(st.integers(64 << 10, 1 << 20))
    stored = StoredTensor.contiguous(
        "w", (data.draw(st.integers(1, 1024)), 1024), torch.int64, 0, 0
    )
    layout = Layout((ranks, 1), (Placement("shard", 0), Placement("replicate")))
    for rank in range(ranks):
        for run in flows_of(stored, layout, readers, stage).rounds(rank):
            reads = [read for flow in run for read in flow.reads.values()]
            assert sum(read.nbytes for read in reads) <= stage


def test_columns_are_one_read_and_rows_are_one_each() -> None:
    stored = stored_as((64, 64), [0, 1])
    (columns,) = shared_reads(stored, shards((64, 64), 1, 4))
    assert (columns.read.box, columns.takers) == (Box.whole((64, 64)), (0, 1, 2, 3))
    rows = shared_reads(stored, shards((64, 64), 0, 4))
    assert [(shared.takers, shared.read.box.numel) for shared in rows] == [
        ((n,), 1024) for n in range(4)
    ]
    transposed = shared_reads(stored_as((64, 64), [1, 0]), shards((64, 64), 0, 4))
    assert [shared.takers for shared in transposed] == [(0, 1, 2, 3)]


def test_long_runs_are_read_by_those_who_want_them() -> None:
    shape = (4, 4, 1 << 14)  # runs of 128 KiB, and as long holes between them
    shared = shared_reads(stored_as(shape, [0, 1, 2]), shards(shape, 1, 4))
    assert [some.takers for some in shared] == [(0,), (1,), (2,), (3,)]
    assert sum(some.read.nbytes for some in shared) == 8 * math.prod(shape)


def rows_on(ranks: int) -> tuple[Box, ...]:
    layout = Layout((ranks,), (Placement("shard", 0),))
    return tuple(local_pieces((8192, 64), layout, (rank,))[0].box for rank in range(ranks))


@pytest.mark.parametrize("dim", [0, 1])
def test_planning_takes_a_step_for_each_rank_and_chunk_that_meet(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    # Saved on 512 ranks, wanted on 256: compared each with each, these would be 131,072 steps.
    chunks = tuple(Chunk(box, 0, box.offsets[0] * 512, (64, 1)) for box in rows_on(512))
    stored = StoredTensor("w", (8192, 64), torch.int64, chunks)
    groups = shards((8192, 64), dim, 256)
    asked: list[Box] = []
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda a, b: asked.append(a) or intersect(a, b))
    whole = shared_reads(in_one_chunk(stored), groups)
    assert sum(shared.read.nbytes for shared in whole) == stored.nbytes
    assert len(asked) <= 256
    asked.clear()
    assert len(shared_reads(stored, groups)) == 512
    # Rows meet few chunks; columns, which 64 of the ranks have, meet all of them.
    assert len(asked) <= (256 + 512 if dim == 0 else 64 * 512)
    if dim == 0:
        asked.clear()
        layout = Layout((256, 1), (Placement("shard", 0), Placement("replicate")))
        (run,) = flows_of(stored, layout, None, 4 << 20).rounds(7)
        assert sum(len(flow.reads) for flow in run) == 4  # of both tensors
        assert len(asked) <= 8 * (256 + 512)


@given(data=st.data())
def test_what_ranks_would_all_read_is_known_without_the_chunks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    dim, gap = (
        data.draw(st.integers(0, len(shape) - 1)),
        data.draw(st.sampled_from([0, 16, 1 << 20])),
    )
    stored, groups = stored_as(shape, order), shards(shape, dim, data.draw(st.integers(1, 4)))
    every = (shared_reads(each, groups, gap) for each in (stored, in_one_chunk(stored)))
    some, whole = ({(each.read.nbytes, each.takers) for each in shared} for shared in every)
    assert some == whole


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
        caches = caches_of(range(4), [0] * 4, [path])
        reason = why_own("auto", caches, [True] * 4)
        return (
            ("own", reason)
            if reason
            else decide("auto", range(4), caches, [True] * 4, repeated)[:2]
        )

    assert decided("/data/w.safetensors", 1 << 30)[0] == "own"
    assert decided("s3://b/w.safetensors", 1 << 30) == (
        "stripe",
        "each rank would otherwise read the same 1.0 GiB",
    )
    assert decided("s3://b/w.safetensors", 1 << 20)[0] == "own"
