"""The order of sums: a function of the number of terms alone, whoever holds which of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.training.data.schedule import slots_of_rank
from anyrank.training.exact.tree_sum import Span, TreeSum, merged, ordered
from anyrank.training.gradients.norm import sum_dtype


def terms(count: int, seed: int) -> list[torch.Tensor]:
    """Values whose sum depends on the order, with negative zeros among them."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.randint(-8, 9, (count, 3), generator=g).float().exp2()
    rows = torch.randn(count, 3, generator=g) * scale
    rows[:, 2] = torch.where(torch.rand(count, generator=g) < 0.5, -0.0, 0.0)
    return list(rows)


def tree_of(count: int, leaves: list[int], values: list[torch.Tensor | None]) -> TreeSum:
    tree = TreeSum(count)
    for k in leaves:
        value = values[k]
        tree.add(Span(k, k + 1), None if value is None else value.clone())
    return tree


def bits(value: torch.Tensor | None) -> list[int] | None:
    return None if value is None else value.view(torch.int32).tolist()


def recursive(values: list[torch.Tensor]) -> torch.Tensor:
    """The definition: left half plus right half."""
    middle = (len(values) + 1) // 2
    if len(values) == 1:
        return values[0]
    return recursive(values[:middle]) + recursive(values[middle:])


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_the_sum_is_that_of_the_balanced_tree(count: int, seed: int) -> None:
    values = terms(count, seed)
    found = tree_of(count, list(range(count)), [*values]).total()
    assert bits(found) == bits(recursive(values) + 0.0)


@given(st.data(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_ranks_may_hold_any_microbatches(data: st.DataObject, count: int, seed: int) -> None:
    missing = data.draw(st.sets(st.integers(0, count - 1)))
    values = [None if k in missing else term for k, term in enumerate(terms(count, seed))]
    owners = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    trees = [tree_of(count, [k for k in range(count) if owners[k] == o], values) for o in range(5)]
    whole = ordered(trees, count).total()
    assert bits(whole) == bits(tree_of(count, list(range(count)), values).total())
    assert (whole is None) == (len(missing) == count)


def most_nodes(count: int, leaves: Sequence[int]) -> int:
    """The most nodes that a rank keeps at once while it adds up some leaves."""
    tree, most = TreeSum(count), 0
    for leaf in leaves:
        tree.add(Span(leaf, leaf + 1), None)
        most = max(most, len(tree.nodes))
    return most


@given(st.integers(1, 200), st.integers(1, 16))
def test_shares_of_the_loader_need_few_nodes(count: int, size: int) -> None:
    for rank in range(size):
        leaves = [slot.k for slot in slots_of_rank(count, rank, size) if not slot.is_copy]
        spans = merged(count, (Span(k, k + 1) for k in leaves))
        most = most_nodes(count, leaves)
        # As docs/exact.md says.
        assert len(spans) <= most <= 1 + 2 * math.log2(max(1, len(leaves)))
        if count % size == 0 and size & (size - 1) == 0:
            assert len(spans) == 1  # a power of two of equal shares: one exchange of one tensor
            assert most <= 1 + math.log2(len(leaves))


def test_negative_zeros_do_not_depend_on_missing_terms() -> None:
    minus = torch.tensor([-0.0])
    tree = TreeSum(2)
    tree.add(Span(0, 1), minus.clone())
    tree.add(Span(1, 2), None)
    assert bits(tree.total()) == [0]


def test_sums_are_of_float32_at_least() -> None:
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
    assert [sum_dtype(kind) for kind in kinds] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
        torch.complex64,
    ]
