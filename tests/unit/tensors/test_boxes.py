"""Boxes are cut into parts that cover them, each element once, in row-major order."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.files.reader import Reader
from anyrank.sources.readers.memory import list_memory
from anyrank.tensors.box import Box

SIZES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(sizes=SIZES, offset=st.integers(0, 3), most=st.integers(0, 130))
def test_a_cut_covers_a_box_once_and_in_order(
    sizes: tuple[int, ...], offset: int, most: int
) -> None:
    box = Box((offset,) * len(sizes), sizes)
    parts = list(box.cut(most))
    assert all(part.numel <= max(1, most) for part in parts)
    shape = tuple(offset + size for size in sizes)
    numbers = torch.arange(Box.whole(shape).numel).view(shape)
    cut = torch.cat([numbers[part.slices()].reshape(-1) for part in parts])
    assert cut.tolist() == numbers[box.slices()].reshape(-1).tolist()


BOXES = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 4))] * 2).map(
    lambda dims: Box(tuple(low for low, _ in dims), tuple(size for _, size in dims))
)


@given(one=BOXES, other=BOXES)
def test_an_intersection_has_the_elements_that_both_have(one: Box, other: Box) -> None:
    has = torch.zeros(2, 7, 7, dtype=torch.bool)
    has[0][one.slices()], has[1][other.slices()] = True, True
    found = torch.zeros(7, 7, dtype=torch.bool)
    if (common := one.intersect(other)) is not None:
        found[common.slices()] = True
    assert torch.equal(found, has.all(0))


@given(size=st.integers(1, 9), rows=st.integers(1, 9))
def test_a_split_has_as_many_rows_as_asked(size: int, rows: int) -> None:
    parts = list(Box((2, 0), (size, 3)).split(0, rows))
    assert [part.offsets[0] for part in parts] == list(range(2, 2 + size, rows))
    assert all(part.sizes[0] == rows for part in parts[:-1])
    assert sum(part.sizes[0] for part in parts) == size


def test_a_source_in_memory_is_read_from_its_listing() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    listing = list_memory({"weight": weight})
    with Reader(listing, buffer_bytes=64) as reader:
        assert torch.equal(reader.read(listing.tensors["weight"]), weight)


def test_the_headers_of_a_source_in_memory_travel_without_its_tensors() -> None:
    listing = list_memory({"weight": torch.zeros(1 << 16)})
    sent = pickle.dumps(listing.without_memory())
    assert len(sent) < 4096
    assert pickle.loads(sent).tensors == listing.tensors
