"""The tree in which ranks talk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anyrank.world.tree import DEGREE, Neighbors, find_neighbors


def places_of(nodes: list[int]) -> list[Neighbors]:
    return [find_neighbors(nodes, index) for index in range(len(nodes))]


@st.composite
def machines(draw: st.DrawFn) -> list[int]:
    """Which machine each rank is on, numbered as they first appear."""
    names = draw(st.lists(st.integers(0, 40), min_size=1, max_size=120))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


@given(machines())
def test_every_rank_but_the_first_hangs_on_one_that_knows_it(nodes: list[int]) -> None:
    places = places_of(nodes)
    assert places[0].parent is None
    for index, place in enumerate(places):
        if index:
            assert place.parent is not None
            assert index in places[place.parent].children
        assert all(places[child].parent == index for child in place.children)
        depth = 0
        while (parent := place.parent) is not None:
            place, depth = places[parent], depth + 1
        assert depth <= 4


@given(machines())
def test_one_connection_of_each_machine_crosses_the_network(nodes: list[int]) -> None:
    parents = [place.parent for place in places_of(nodes)]
    crossing = [i for i, p in enumerate(parents) if p is not None and nodes[p] != nodes[i]]
    assert len(crossing) == len({*nodes}) - 1


@given(machines())
def test_a_rank_has_few_neighbors(nodes: list[int]) -> None:
    for place in places_of(nodes):
        assert len(place.children) <= 2 * DEGREE


def test_ranks_of_one_machine() -> None:
    assert find_neighbors([0] * 40, 0) == Neighbors(None, tuple(range(1, 17)))
    assert find_neighbors([0] * 40, 1) == Neighbors(0, tuple(range(17, 33)))
    assert find_neighbors([0] * 40, 2) == Neighbors(0, tuple(range(33, 40)))
    assert find_neighbors([0] * 40, 39) == Neighbors(2, ())


def test_ranks_of_two_machines() -> None:
    nodes = [0, 0, 1, 1]
    assert places_of(nodes) == [
        Neighbors(None, (2, 1)),
        Neighbors(0, ()),
        Neighbors(0, (3,)),
        Neighbors(2, ()),
    ]
