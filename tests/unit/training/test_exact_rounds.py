"""Rounds of a step's microbatches: each is exchanged once, and few nodes are kept in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anyrank.training.data.schedule import StepPlan, slots_of_rank
from anyrank.training.exact.rounds import Rounds
from anyrank.training.exact.tree_sum import TreeSum
from anyrank.world.ranks import Ranks


class OneOf(Ranks):
    """One of several ranks that are not there."""

    def __init__(self, index: int, size: int) -> None:
        self.ranks, self.rank = tuple(range(size)), index


def rounds_of(count: int, index: int, size: int, takes_turns: bool) -> Rounds:
    plan = StepPlan(epoch=0, number=0, start=0, stop=count, microbatch=1)
    return Rounds(plan, OneOf(index, size), takes_turns)


@given(st.integers(1, 70), st.integers(1, 9))
def test_every_microbatch_is_exchanged_once(count: int, size: int) -> None:
    every = [rounds_of(count, index, size, True) for index in range(size)]
    exchanged: list[int] = []
    num_rounds = len(slots_of_rank(count, 0, size))
    plan = StepPlan(epoch=0, number=0, start=0, stop=count, microbatch=1)
    slots = [plan.slots(index, size, True) for index in range(size)]
    for number in range(num_rounds):
        for rounds, own_slots in zip(every, slots, strict=True):
            rounds.begin(own_slots[number].k, number + 1 == num_rounds)
        assert {rounds.number for rounds in every} == {number}
        spans = every[0].unit_spans(number)
        assert all(rounds.unit_spans(number) == spans for rounds in every)
        for rounds, own in zip(every, spans, strict=True):
            leaves = [leaf for span in own for leaf in range(*span)]
            assert leaves == [leaf for leaf in [rounds.leaf] if leaf is not None]
            exchanged += leaves
    assert sorted(exchanged) == list(range(count))


@given(st.integers(1, 70), st.integers(1, 9), st.booleans())
def test_the_whole_spans_have_every_microbatch_once(
    count: int, size: int, takes_turns: bool
) -> None:
    rounds = rounds_of(count, 0, size, takes_turns)
    whole = [leaf for spans in rounds.whole_spans for span in spans for leaf in range(*span)]
    assert sorted(whole) == list(range(count))


@given(st.integers(1, 200), st.integers(1, 16))
def test_where_ranks_take_turns_they_keep_few_nodes(count: int, size: int) -> None:
    rounds = rounds_of(count, 0, size, True)
    kept = TreeSum(count)
    num_rounds = len(slots_of_rank(count, 0, size))
    for number in range(num_rounds):
        kept.extend((span, None) for spans in rounds.unit_spans(number) for span in spans)
        # As docs/exact.md says.
        assert len(kept.nodes) <= 1 + (count - 1).bit_length()
        if count & (count - 1) == 0 and size & (size - 1) == 0:
            assert len(kept.nodes) <= max(1, (num_rounds - 1).bit_length())
    assert kept.spans() == [(0, count)]
