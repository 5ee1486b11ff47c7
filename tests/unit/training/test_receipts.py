"""Receipts: what a few bytes say of which samples were taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyrank.training.data.receipts import EpochVerdict, Receipt, epochs_in_words, receipt_of

IDS = st.lists(st.integers(0, 2**50), max_size=40)


def of(ids: list[int], epoch: int = 0) -> Receipt:
    return receipt_of(epoch, torch.tensor(ids, dtype=torch.int64))


@settings(deadline=None)
@given(IDS, st.integers(0, 40), st.randoms(use_true_random=False))
def test_parts_add_up_to_the_whole_in_any_order(ids: list[int], cut: int, draws: Any) -> None:
    whole = of(ids)
    assert of(ids[:cut]) + of(ids[cut:]) == whole
    draws.shuffle(ids)
    assert of(ids) == whole


@settings(deadline=None)
@given(st.sets(st.integers(0, 999), min_size=2, max_size=40), st.data())
def test_a_sample_lost_repeated_or_exchanged_is_noticed(ids: set[int], data: Any) -> None:
    right = sorted(ids)
    one, other = data.draw(st.permutations(right))[:2]
    lost = [i for i in right if i != one]
    for wrong in (lost, [*right, one], [*right, one, one], [*lost, other], [*lost, 1000]):
        assert of(wrong) != of(right)


def test_the_same_sample_differs_between_epochs() -> None:
    assert of([3], epoch=0) != of([3], epoch=1)


def test_the_hash_is_the_one_that_checkpoints_hold() -> None:
    assert of([0, 1, 2], epoch=1).to_json() == EXPECTED


EXPECTED = [3, "8d6e27fcd6adccde"]


@settings(deadline=None)
@given(IDS)
def test_json_keeps_it(ids: list[int]) -> None:
    assert Receipt.from_json(of(ids).to_json()) == of(ids)


@pytest.mark.parametrize("value", [None, [], [1, 2], [1, "x" * 16], "abc"])
def test_what_is_no_receipt_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Receipt.from_json(value)


def test_epochs_alike_are_one_line() -> None:
    alike = [EpochVerdict(epoch, 96, "exactly once") for epoch in range(60)]
    other = EpochVerdict(60, 1, "exactly once")
    assert epochs_in_words([*alike, other]) == [
        "epochs 0 to 59: 96 samples each, exactly once",
        "epoch 60: 1 sample exactly once",
    ]
    assert epochs_in_words([]) == []
