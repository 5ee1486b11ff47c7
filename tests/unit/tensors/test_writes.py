"""Who writes what of tensors that all ranks hold: each element once, and each rank as much."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.models.dtensors import as_sharded
from anyrank.tensors import writes
from anyrank.tensors.sharded_tensor import coordinates_of
from anyrank.tensors.writes import plan_writes

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=8)


@given(shapes=SHAPES, size=st.integers(1, 5), first=st.booleans())
def test_each_element_is_written_once_and_ranks_write_alike(
    shapes: list[tuple[int, int]], size: int, first: bool
) -> None:
    piece_bytes, writes.PIECE_BYTES = writes.PIECE_BYTES, 64
    try:
        tensors = [as_sharded(f"t{n}", torch.zeros(shape)) for n, shape in enumerate(shapes)]
        known = coordinates_of(tensors)
        names = {"t0"} if first else set[str]()
        planned = plan_writes(tensors, dict.fromkeys(range(size), known), by_first=names)
    finally:
        writes.PIECE_BYTES = piece_bytes
    load = [0] * size
    for index, shape in enumerate(shapes):
        times = torch.zeros(shape)
        for write in planned:
            if write.index == index:
                times[write.piece.box.slices()] += 1
                load[write.writer] += write.nbytes
                assert not (first and index == 0 and write.writer)
        assert bool((times == 1).all())
    largest = max(write.nbytes for write in planned)
    own = 4 * shapes[0][0] * shapes[0][1] if first else 0
    assert max(load) - min(load) <= max(largest, own)
