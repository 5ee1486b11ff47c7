"""Random generators: seeded for a block, saved as bytes, restored exactly or derived."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyrank
from anyrank.training.random_state import generators
from anyrank.training.random_state.generators import (
    NumpyGenerator,
    PythonGenerator,
    TorchGenerator,
    ambient,
    seeded,
)
from anyrank.training.random_state.saved import (
    GeneratorOutcome,
    GeneratorState,
    RankCoords,
    SavedGenerators,
    Scope,
    capture,
    coordinate,
    digests_of_generators,
    from_json,
    restore,
    scopes_of,
)

ONE = RankCoords(0, 1, 0, 1)
NAMES = ["python", "numpy", "torch"]


def draws(generators: Mapping[str, torch.Generator] | None = None) -> list[float]:
    """Numbers of all streams; also of those that keep a half-used pair of normals."""
    own = [torch.rand((), generator=one).item() for one in (generators or {}).values()]
    normals = [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()]
    return [random.random(), np.random.rand(), torch.rand(()).item(), *normals, *own]


def seed_all(number: int) -> None:
    for stream in ambient():
        stream.seed(number)


def assert_scopes(
    gathered: Sequence[tuple[RankCoords, Mapping[str, str], Mapping[str, GeneratorOutcome]]],
    scopes: Mapping[str, Scope],
) -> None:
    """What all ranks have after a restore fits the scopes: equal where they say so, and what was
    derived is shared by no others.
    """
    for name, scope in scopes.items():
        pairs = {(coordinate(scope, coords), found[name]) for coords, found, _ in gathered}
        if scope == "global":
            assert len({digest for _, digest in pairs}) == 1, name
        elif any(outcomes[name].how == "derived" for *_, outcomes in gathered):
            assert len({digest for _, digest in pairs}) == len({place for place, _ in pairs})
            assert len(pairs) == len({place for place, _ in pairs}), name


def fingerprints() -> dict[str, str]:
    """Stream -> digest of its state now."""
    return digests_of_generators(capture({}))


@dataclass
class Saved:
    """The streams of a checkpoint as text: what the manifest has, and each rank's own file."""

    coords: Sequence[RankCoords]
    ranks: Sequence[dict[str, GeneratorState]]
    unused: Sequence[str] = ()

    @property
    def scopes(self) -> dict[str, Scope]:
        return scopes_of(self.coords, [digests_of_generators(rank) for rank in self.ranks])

    @property
    def manifest(self) -> str:
        shared = {name: self.ranks[0][name] for name, s in self.scopes.items() if s == "global"}
        unused = [*self.unused]
        saved = SavedGenerators([*self.coords], self.scopes, shared, unused=unused)
        return json.dumps(saved.to_json())

    def for_rank(self, coords: RankCoords) -> SavedGenerators:
        """As a rank reads them: with its own file, or the first rank's."""
        rank = coords.rank if coords.world_size == len(self.ranks) else 0
        shared = [name for name, scope in self.scopes.items() if scope == "global"]
        own = {name: state for name, state in self.ranks[rank].items() if name not in shared}
        return from_json(json.loads(self.manifest), json.loads(json.dumps(own)))


def saved_by(coords: Sequence[RankCoords], ranks: Sequence[dict[str, GeneratorState]]) -> Saved:
    return Saved(coords, ranks)


def saved_here(generators: Mapping[str, torch.Generator] | None = None) -> Saved:
    """The streams of this process, alone."""
    return saved_by([ONE], [capture(generators or {})])


def restored(saved: Saved, coords: RankCoords, **options: Any) -> Any:
    given: dict[str, Any] = {"seed": 1, "samples": 64, "generators": {}, **options}
    return restore(saved.for_rank(coords), coords, **given)


# -- blocks ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_block_has_its_own_numbers_and_leaves_no_trace(number: int, before: int) -> None:
    seed_all(before)
    expected = [draws(), draws()]
    seed_all(before)
    found = [draws()]
    with seeded(number):
        first = draws()
    with contextlib.suppress(KeyError), seeded(number):
        assert draws() == first
        raise KeyError
    found.append(draws())
    assert found == expected
    with seeded(number ^ 1):
        assert not set(draws()) & set(first)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_state_of_numpy_is_what_get_state_returns_also_between_two_normals(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (numpy,) = [each for each in ambient() if each.name == "numpy"]
    if not is_known:  # a numpy whose state is in another form in memory
        monkeypatch.setattr(type(numpy), "_memory", lambda _: None)
    chance = random.Random(0)
    calls = [np.random.randn, np.random.rand, lambda: np.random.normal(size=3)]
    for _ in range(200):
        np.random.seed(chance.randint(0, 9))
        for _ in range(chance.randint(0, 5)):
            chance.choice(calls)()
        expected = NumpyGenerator().to_json(np.random.get_state(legacy=False))
        state = numpy.get()
        assert numpy.to_json(state) == expected
        assert numpy.to_json(numpy.get()) == expected  # reading it has changed nothing
        chance.choice(calls)()
        for each in (state, numpy.from_json(expected)):
            numpy.put(each)
            assert NumpyGenerator().to_json(np.random.get_state(legacy=False)) == expected


def test_streams_of_a_block_differ_from_one_another() -> None:
    # All three have the same twister: one seed for two of them could give the same bits.
    with seeded(2**63 + 5):
        words = [random.getrandbits(32) for _ in range(8)]
        others = np.random.randint(0, 2**32, 8, dtype=np.uint32).tolist()
        torchs = torch.randint(0, 2**32, (8,)).tolist()
    assert len({*words, *others, *torchs}) == 24


def test_numpy_is_left_alone_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert [stream.name for stream in ambient()] == ["python", "torch"]


# -- there and back -------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 700))
def test_the_same_ranks_go_on_exactly(seed: int, ahead: int) -> None:
    generators = {"noise": torch.Generator().manual_seed(seed)}
    seed_all(seed)
    for _ in range(ahead % 7):
        draws(generators)
    np.random.rand(ahead)
    saved = saved_here(generators)
    expected = [draws(generators) for _ in range(3)]
    outcomes = restored(saved, ONE, generators=generators)
    assert outcomes == dict.fromkeys(
        [*NAMES, "generator.noise"], GeneratorOutcome("exact", "same ranks")
    )
    assert [draws(generators) for _ in range(3)] == expected


def test_streams_are_json_and_equal_states_are_there_once() -> None:
    seed_all(0)
    states = capture({})
    saved = saved_by(each_rank(4, 4), [states] * 4)
    table = json.loads(saved.manifest)
    assert len(saved.manifest) < 16_000
    assert table["scopes"] == dict.fromkeys(NAMES, "global")
    assert [*table["states"]] == NAMES
    assert {state["algorithm"] for state in table["states"].values()} == {"mt19937"}
    assert saved.for_rank(RankCoords(1, 4, 1, 4)).own_states == {}


def each_rank(world: int, data: int) -> list[RankCoords]:
    return [RankCoords(r, world, r * data // world, data) for r in range(world)]


@settings(deadline=None)
@given(
    saved=st.integers(1, 5),
    now=st.integers(1, 5),
    scopes=st.fixed_dictionaries({n: st.sampled_from(["global", "rank"]) for n in NAMES}),
)
def test_any_number_of_ranks_goes_on_and_none_shares_a_stream(
    saved: int, now: int, scopes: dict[str, Scope]
) -> None:
    ranks: list[dict[str, GeneratorState]] = []
    for coords in each_rank(saved, saved):
        for stream in ambient():
            # One rank alone shares nothing: its streams have the scope "rank" whatever the seed is.
            shared = scopes[stream.name] == "global"
            stream.seed(0 if shared else coords.rank + 1)
        ranks.append(capture({}))
    streams_saved = saved_by(each_rank(saved, saved), ranks)
    found = streams_saved.scopes
    results: list[Any] = []
    for attempt, coords in itertools.product(range(2), each_rank(now, now)):
        seed_all(99 + attempt)  # what a fresh process has
        outcomes = restored(streams_saved, coords)
        results.append((coords, fingerprints(), outcomes))
        for name, outcome in outcomes.items():
            is_exact = saved == now or found[name] == "global"
            assert outcome.how == ("exact" if is_exact else "derived"), outcome
    assert results[:now] == results[now:]  # the same again
    assert_scopes(results[:now], found)
    for name, scope in found.items():
        assert scope == ("global" if saved > 1 and scopes[name] == "global" else "rank")
        states = {digests[name] for _, digests, _ in results[:now]}
        assert len(states) == (1 if scope == "global" else now)


def test_ranks_with_the_same_data_share_what_is_theirs() -> None:
    ranks: list[dict[str, GeneratorState]] = []
    for coords in each_rank(4, 2):
        for stream, number in zip(ambient(), (coords.data_index, coords.rank, 0), strict=True):
            stream.seed(number)
        ranks.append(capture({}))
    streams_saved = saved_by(each_rank(4, 2), ranks)
    scopes = streams_saved.scopes
    assert scopes == {"python": "dp", "numpy": "rank", "torch": "global"}
    results: list[Any] = []
    for coords in each_rank(6, 3):
        outcomes = restored(streams_saved, coords)
        results.append((coords, fingerprints(), outcomes))
    assert_scopes(results, scopes)
    assert [len({p[name] for _, p, _ in results}) for name in NAMES] == [3, 6, 1]


def seeded_apart(count: int) -> list[dict[str, GeneratorState]]:
    """The streams of ranks that share none."""
    ranks: list[dict[str, GeneratorState]] = []
    for rank in range(count):
        seed_all(rank)
        ranks.append(capture({}))
    return ranks


def test_derived_streams_depend_on_seed_and_samples() -> None:
    saved = saved_by(each_rank(2, 2), seeded_apart(2))
    found: list[str] = []
    for options in ({}, {"seed": 2}, {"samples": 65}):
        restored(saved, ONE, **options)
        found.append(fingerprints()["torch"])
    assert len(set(found)) == 3


# -- what is not the same any more ----------------------------------------------------------------


class Renamed(PythonGenerator):
    """Python's stream as another kind of device would have it."""

    algorithm = "cuda philox"


def test_another_kind_of_stream_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_here()
    monkeypatch.setattr("anyrank.training.random_state.saved.ambient", lambda _: [Renamed()])
    outcome = restored(saved, ONE)["python"]
    assert outcome == GeneratorOutcome("derived", "saved as mt19937, now cuda philox")


def edited(name: str, change: Any) -> Saved:
    """The streams of this process, one of whose states is another version's."""
    states = capture({})
    states[name] |= {"state": change(states[name]["state"])}
    return saved_by([ONE], [states])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("python", lambda state: [9, *state[1:]]),
        ("python", lambda state: [state[0], state[1][:-8], None]),
        ("numpy", lambda state: [state[0], 625, *state[2:]]),
        ("numpy", lambda state: [state[0][8:], *state[1:]]),
        ("numpy", lambda state: state[0]),
        ("torch", lambda state: state[4:]),
    ],
)
def test_a_state_that_cannot_be_read_is_derived(name: str, change: Any) -> None:
    outcomes = restored(edited(name, change), ONE)
    assert outcomes[name] == ("derived", "saved by another version, or corrupt")
    assert {one.how for other, one in outcomes.items() if other != name} == {"exact"}


def test_streams_that_are_new_or_gone_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = {"old": torch.Generator()}
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        saved = saved_here(generators)
    new = torch.Generator().manual_seed(0)
    before = new.get_state()
    outcomes = restored(saved, ONE, generators={"new": new})
    assert outcomes["numpy"] == GeneratorOutcome("derived", "it was not saved")
    assert outcomes["generator.new"] == GeneratorOutcome("derived", "it was not saved")
    assert outcomes["generator.old"].how == "skipped"
    assert outcomes["python"].how == "exact"
    assert not torch.equal(new.get_state(), before)
    # Also on a rank that did not save
    outcomes = restored(saved, RankCoords(1, 2, 1, 2), generators={"new": new})
    assert outcomes["generator.new"] == GeneratorOutcome("derived", "it was not saved")
    assert outcomes["python"] == GeneratorOutcome(
        "derived", "saved on fewer ranks, now on rank 1 of 2, data 1 of 2"
    )


def test_more_accelerator_states_than_devices_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = TorchGenerator("device", torch.Generator())
    real = generators.ambient
    with monkeypatch.context() as patch:
        patch.setattr(
            "anyrank.training.random_state.saved.ambient", lambda devices: [*real(devices), spare]
        )
        saved = saved_by(each_rank(7, 7), seeded_apart(7))
    outcomes = restored(saved, RankCoords(5, 6, 5, 6))
    assert outcomes.pop("device") == GeneratorOutcome(
        "skipped", "it was saved but is not used by this process"
    )
    assert {one.how for one in outcomes.values()} == {"derived"}


# -- scopes ---------------------------------------------------------------------------------------

RANKS = each_rank(4, 2)
OBSERVED: dict[str, tuple[list[Any], Scope]] = {
    "equal on all": (["a", "a", "a", "a"], "global"),
    "equal by data": (["a", "a", "b", "b"], "dp"),
    "all different": (["a", "b", "c", "d"], "rank"),
    "equal across data": (["a", "b", "a", "b"], "rank"),
    "one differs": (["a", "a", "a", "b"], "rank"),
    "on some only": (["a", None, "a", "a"], "rank"),
}


def observed(digests: list[Any], ranks: list[RankCoords]) -> Scope:
    rows = [{} if digest is None else {"x": digest} for digest in digests]
    return scopes_of(ranks, rows)["x"]


@pytest.mark.parametrize("name", OBSERVED)
def test_scopes_are_those_that_are_observed(name: str) -> None:
    prints, scope = OBSERVED[name]
    assert observed(prints, RANKS) == scope


def test_one_rank_alone_and_data_ranks_alone_have_rank_scope() -> None:
    assert observed(["a"], [ONE]) == "rank"
    assert observed(["a", "b"], each_rank(2, 2)) == "rank"


def test_what_nobody_drew_from_is_derived_without_a_word() -> None:
    ranks = seeded_apart(2)
    coords = each_rank(2, 2)
    streams_saved = replace(saved_by(coords, ranks), unused=["python", "numpy"])
    outcomes = restored(streams_saved, RankCoords(2, 3, 2, 3))
    assert {name: one.how for name, one in outcomes.items()} == {
        "python": "unused",
        "numpy": "unused",
        "torch": "derived",
    }
    other = fingerprints()
    assert {one.how for one in restored(streams_saved, coords[1]).values()} == {"exact"}
    restored(streams_saved, RankCoords(1, 3, 1, 3))
    assert all(fingerprints()[name] != other[name] for name in NAMES)  # new, each rank its own


def test_a_resume_is_no_draw_from_streams_that_nobody_uses(tmp_path: Path) -> None:
    """Else each later resume on another number of ranks would call them derived."""
    for step in range(3):
        random.seed(step)  # each process begins with a state of its own
        np.random.seed(step)
        state = anyrank.TrainState(torch.nn.Linear(2, 1))
        with anyrank.Checkpoints(tmp_path, state, keep=4) as ckpts:
            ckpts.resume()
            if step == 2:
                random.random()
            ckpts.step_done()
            ckpts.save()
    unused = [
        json.loads((tmp_path / f"step-{step:08}" / "anyrank.json").read_text())["generators"][
            "unused"
        ]
        for step in (1, 2, 3)
    ]
    every = ["numpy", "python", "torch"]
    assert unused == [every, every, ["numpy", "torch"]]
