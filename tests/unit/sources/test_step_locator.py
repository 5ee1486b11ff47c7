"""Which indexes of ranks a reader of a step needs, and which tensors `locate` can find."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.files.listing import Listing
from anyrank.files.manifest import RankFiles
from anyrank.files.storage import FileRecord
from anyrank.sources.locate import has_remade
from anyrank.sources.readers.joining import join
from anyrank.sources.step_index import IndexedTensor, StepIndex
from anyrank.sources.step_listing import StepLocator
from anyrank.tensors.layout import Layout, Placement, local_pieces
from anyrank.tensors.spread import Spread

MOST = 40


def layout_of(ranks: int) -> Layout:
    """As FSDP2 cuts tensors: along their first dim."""
    return Layout((ranks,), (Placement("shard", 0),))


def saved_on(ranks: int, shapes: dict[str, tuple[int, ...]]) -> Listing:
    """The listing of a step that these ranks have saved."""
    spread = Spread(layout_of(ranks), [(rank,) for rank in range(ranks)])
    tensors = [IndexedTensor(name, shape, torch.float32, spread) for name, shape in shapes.items()]
    files = [RankFiles(1 << 20, FileRecord(1, "0"))] * ranks
    return StepLocator("run/step-00000001", files, StepIndex(tensors, {}), ()).list_shapes()


def met(listing: Listing, rank: int, ranks: int) -> set[int]:
    """The ranks whose indexes a rank reads that loads its share."""
    locator = listing.locators[0]
    assert isinstance(locator, StepLocator)
    wanted = [
        (stored, local_pieces(stored.shape, layout_of(ranks), (rank,)))
        for stored in listing.tensors.values()
    ]
    return locator.ranks_for(wanted)


@given(st.integers(1, 300), st.integers(1, MOST), st.integers(1, MOST))
def test_a_share_of_a_tensor_meets_few_indexes(rows: int, saved: int, loading: int) -> None:
    listing = saved_on(saved, {"weight": (rows, 2)})
    for rank in range(loading):
        assert len(met(listing, rank, loading)) <= saved / loading + 2


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, MOST),
    st.integers(1, MOST),
)
def test_a_share_of_a_model_meets_few_indexes(sizes: list[int], saved: int, loading: int) -> None:
    """Where the ranks that saved and those that load divide the rows of all tensors."""
    both = math.lcm(saved, loading)
    listing = saved_on(saved, {f"{n}.weight": (both * size, 2) for n, size in enumerate(sizes)})
    for rank in range(loading):
        ranks = met(listing, rank, loading)
        assert len(ranks) <= saved / loading + 2
        assert saved != loading or ranks == {rank}


def test_only_tensors_as_they_are_listed_can_be_located() -> None:
    """A part of a tensor that has the shape of another one is not that other one."""
    step = saved_on(2, {"a": (4, 2), "b": (2, 2), "c": (4, 2)})
    listing = join("two", [Listing("one", step.files, {}), step])
    a, b, c = (listing.tensors[name] for name in "abc")
    assert not has_remade(listing, [a, b.renamed("weight"), c])
    (chunk,) = a.chunks
    first = replace(a, shape=(2, 2), chunks=(replace(chunk, box=b.chunks[0].box),))
    second = replace(first, chunks=(replace(first.chunks[0], offset=chunk.offset + 16),))
    square = b.transposed()
    joined = replace(c, shape=(8, 2), chunks=(*a.chunks, *c.chunks))
    other_dtype = replace(a, dtype=torch.int32)
    for remade in (first, second, square, joined, other_dtype):
        assert has_remade(listing, [b, remade])
    assert not has_remade(replace(listing, locators={}), [joined])
