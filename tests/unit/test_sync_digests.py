"""What both ends of a sync are compared by where a device takes part: sums of their words."""

from __future__ import annotations

import pytest
import torch

from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.live.digests import (
    choose_digest,
    hashes_of_all,
    parts_of,
    sums_of_all,
)

VALUES = {
    "float32": torch.arange(23.0),
    "bfloat16": torch.arange(7.0).bfloat16(),
    "float8": torch.arange(13.0).to(torch.float8_e4m3fn),
    "float64": torch.arange(3, dtype=torch.float64),
    "flags": torch.arange(17) > 5,
    "count": torch.tensor(3),
    "complex64": torch.arange(9.0).to(torch.complex64),
    "complex128": torch.arange(5.0).to(torch.complex128),
}


def digest(*tensors: torch.Tensor) -> list[bytes]:
    return sums_of_all(parts_of(tensor) for tensor in tensors)


@pytest.mark.parametrize("name", VALUES)
def test_any_byte_that_differs_is_seen_in_its_own_tensor_alone(name: str) -> None:
    values = [VALUES["count"], VALUES[name], VALUES["flags"]]
    before = digest(*values)
    whole = values[1].reshape(-1).view(torch.uint8)
    for position in range(whole.numel()):
        changed = whole.clone()
        changed[position] ^= 1 if name == "flags" else 128
        after = digest(values[0], changed.view(values[1].dtype), values[2])
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1], position


@pytest.mark.parametrize(
    "pair", [(1, 3), (0, 2), (0, 1), (5, 69), (BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4)], ids=str
)
def test_two_changes_do_not_make_up_for_each_other(pair: tuple[int, int]) -> None:
    """Two signs, which a sum of odd multiples loses in the highest bit; and two values."""
    values = torch.arange(1.0, 1 + BLOCK_BYTES // 2)
    negated, exchanged = values.clone(), values.clone()
    negated[list(pair)] *= -1
    exchanged[list(pair)] = values[list(pair[::-1])]
    assert len({*digest(values, negated, exchanged)}) == 3


def test_neither_layout_nor_what_comes_before_counts() -> None:
    values = torch.arange(300 * 777.0).view(300, 777)
    turned = values.t().contiguous().t()
    alone = sums_of_all([[values[:90, 1:], values[90:]]])
    after = sums_of_all([[values[:5]], [turned[:90, 1:], turned[90:]]])
    assert after[1:] == alone
    assert after[0] != alone[0]
    assert digest(torch.zeros(0, 4)) == digest(torch.zeros(0))


def test_one_rank_with_a_device_decides_for_all() -> None:
    assert choose_digest(["", "", "meta"]) is hashes_of_all  # a model on meta gets memory anywhere
    for names in (["", "cuda:GPU-1"], ["several"], ["sim", "sim"]):
        assert choose_digest(names) is sums_of_all
