"""Random streams: seeded for a block, saved as bytes, restored exactly or derived."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyrank
from anyrank.random_state import saved_streams, streams
from anyrank.random_state.saved_streams import (
    MAGIC,
    Outcome,
    Place,
    Scope,
    capture,
    check_scopes,
    fingerprints,
    observed_scopes,
    read_blob,
    restore,
)
from anyrank.random_state.streams import PythonStream, TorchStream, ambient, seeded

ONE = Place(0, 1, 0, 1)
NAMES = ["python", "numpy", "torch"]


def draws(generators: Mapping[str, torch.Generator] | None = None) -> list[float]:
    """Numbers of all streams; also of those that keep a half-used pair of normals."""
    own = [torch.rand((), generator=one).item() for one in (generators or {}).values()]
    normals = [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()]
    return [random.random(), np.random.rand(), torch.rand(()).item(), *normals, *own]


def seed_all(number: int) -> None:
    for stream in ambient():
        stream.seed(number)


def restored(blob: bytes | None, place: Place, first: bytes | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {"seed": 1, "samples": 64, "generators": {}, "scopes": {}, **options}
    return restore(blob, first or blob or b"", given.pop("scopes"), place, **given)


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
    blob = capture(ONE, generators)
    expected = [draws(generators) for _ in range(3)]
    outcomes = restored(blob, ONE, generators=generators)
    assert outcomes == dict.fromkeys([*NAMES, "generator.noise"], Outcome("exact", "same ranks"))
    assert [draws(generators) for _ in range(3)] == expected


def test_a_blob_is_json_and_bytes() -> None:
    blob = capture(ONE, {})
    assert len(blob) < 12_000
    head = blob[len(MAGIC) + 4 :]
    table = json.JSONDecoder().raw_decode(head[: head.rindex(b"}]}") + 3].decode())[0]
    assert table["torch"] == torch.__version__
    assert [row["name"] for row in table["streams"]] == NAMES
    assert {row["algorithm"] for row in table["streams"]} == {"mt19937"}
    assert b"\x80\x04" not in blob[:40]


def each_rank(world: int, data: int) -> list[Place]:
    return [Place(r, world, r * data // world, data) for r in range(world)]


@settings(deadline=None)
@given(
    saved=st.integers(1, 5),
    now=st.integers(1, 5),
    scopes=st.fixed_dictionaries({n: st.sampled_from(["global", "dp", "rank"]) for n in NAMES}),
)
def test_any_number_of_ranks_goes_on_and_none_shares_a_stream(
    saved: int, now: int, scopes: dict[str, Scope]
) -> None:
    blobs: list[bytes] = []
    for place in each_rank(saved, saved):
        for stream in ambient():
            stream.seed(0 if scopes[stream.name] == "global" else place.rank + 1)
        blobs.append(capture(place, {}))
    results: list[Any] = []
    for attempt, place in itertools.product(range(2), each_rank(now, now)):
        seed_all(99 + attempt)  # what a fresh process has
        own = blobs[place.rank] if place.rank < saved else None
        outcomes = restored(own, place, blobs[0], scopes=scopes)
        results.append((place, fingerprints({}), outcomes))
        for name, outcome in outcomes.items():
            is_exact = saved == now or scopes[name] == "global"
            assert outcome.how == ("exact" if is_exact else "derived"), outcome
    assert results[:now] == results[now:]  # the same again
    check_scopes(results[:now], scopes)
    for name, scope in scopes.items():
        states = {prints[name] for _, prints, _ in results[:now]}
        assert len(states) == (1 if scope == "global" else now)


def test_ranks_with_the_same_data_share_what_is_theirs() -> None:
    seed_all(0)
    blob = capture(ONE, {})
    scopes: dict[str, Scope] = {"python": "dp", "numpy": "rank", "torch": "global"}
    results: list[Any] = []
    for place in each_rank(4, 2):
        outcomes = restored(blob if place.rank == 0 else None, place, blob, scopes=scopes)
        results.append((place, fingerprints({}), outcomes))
    check_scopes(results, scopes)
    assert [len({p[name] for _, p, _ in results}) for name in NAMES] == [2, 4, 1]


def test_derived_streams_depend_on_seed_and_samples() -> None:
    blob = capture(Place(0, 2, 0, 2), {})
    found: list[str] = []
    for options in ({}, {"seed": 2}, {"samples": 65}):
        restored(blob, ONE, **options)
        found.append(fingerprints({})["torch"])
    assert len(set(found)) == 3


# -- what is not the same any more ----------------------------------------------------------------


class Renamed(PythonStream):
    """Python's stream as another kind of device would have it."""

    algorithm = "cuda philox"


class Longer(PythonStream):
    """Its state is longer than it was."""

    def encode(self, state: Any) -> tuple[list[Any], bytes]:
        values, data = super().encode(state)
        return values, data + b"1234"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (Renamed(), "saved as mt19937, now cuda philox"),
        (Longer(), r"saved as 2500 bytes by torch \S+, now 2504 bytes"),
    ],
)
def test_another_kind_of_stream_is_derived(
    stream: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = capture(ONE, {})
    monkeypatch.setattr(saved_streams, "ambient", lambda _: [stream])
    outcome = restored(blob, ONE)["python"]
    assert outcome.how == "derived"
    assert re.fullmatch(reason, outcome.reason)


def test_streams_that_are_new_or_gone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = {"old": torch.Generator()}
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        blob = capture(ONE, generators)
    new = torch.Generator().manual_seed(0)
    before = new.get_state()
    outcomes = restored(blob, ONE, generators={"new": new})
    assert outcomes["numpy"] == Outcome("derived", "it was not saved")
    assert outcomes["generator.new"] == Outcome("derived", "it was not saved")
    assert outcomes["generator.old"].how == "skipped"
    assert outcomes["python"].how == "exact"
    assert not torch.equal(new.get_state(), before)
    # Also on a rank that had no blob
    outcomes = restored(None, Place(1, 2, 1, 2), blob, generators={"new": new})
    assert outcomes["generator.new"] == Outcome("derived", "it was not saved")
    assert outcomes["python"] == Outcome(
        "derived", "saved on fewer ranks, now on rank 1 of 2, data 1 of 2"
    )


def test_more_accelerator_states_than_devices_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = TorchStream("device", torch.Generator())
    real = streams.ambient
    with monkeypatch.context() as patch:
        patch.setattr(saved_streams, "ambient", lambda devices: [*real(devices), spare])
        blobs = [capture(place, {}) for place in each_rank(7, 7)]
    outcomes = restored(blobs[5], Place(5, 6, 5, 6), blobs[0])
    assert outcomes.pop("device") == Outcome("skipped", "it was saved and is not in use here")
    assert {one.how for one in outcomes.values()} == {"derived"}


# -- scopes ---------------------------------------------------------------------------------------

PLACES = each_rank(4, 2)
OBSERVED: dict[str, tuple[list[Any], Scope]] = {
    "equal on all": (["a", "a", "a", "a"], "global"),
    "equal by data": (["a", "a", "b", "b"], "dp"),
    "all different": (["a", "b", "c", "d"], "rank"),
    "equal across data": (["a", "b", "a", "b"], "rank"),
    "one differs": (["a", "a", "a", "b"], "rank"),
    "on some only": (["a", None, "a", "a"], "rank"),
}


def gathered(prints: list[Any], places: list[Place] | None = None) -> list[Any]:
    return [
        (place, {} if one is None else {"x": one})
        for place, one in zip(places or PLACES, prints, strict=True)
    ]


@pytest.mark.parametrize("name", OBSERVED)
def test_scopes_are_those_that_are_observed(name: str) -> None:
    prints, scope = OBSERVED[name]
    assert observed_scopes(gathered(prints), {}) == {"x": scope}


def test_one_rank_alone_and_data_ranks_alone_have_rank_scope() -> None:
    assert observed_scopes(gathered(["a"], [ONE]), {}) == {"x": "rank"}
    assert observed_scopes(gathered(["a", "b"], each_rank(2, 2)), {}) == {"x": "rank"}


def test_a_declared_scope_holds_or_is_an_error() -> None:
    assert observed_scopes(gathered(["a"] * 4), {"x": "rank"}) == {"x": "rank"}
    assert observed_scopes(gathered(["a"], [ONE]), {"x": "global"}) == {"x": "global"}
    with pytest.raises(anyrank.CheckpointError, match=r"x is declared global.*ranks 0 and 3"):
        observed_scopes(gathered(["a", "a", "a", "b"]), {"x": "global"})
    with pytest.raises(ValueError, match="scope of x is 'world'"):
        observed_scopes(gathered(["a"] * 4), {"x": "world"})  # type: ignore[dict-item]


WRONG: dict[str, tuple[list[str], Scope, str, str]] = {
    "global differs": (["a", "a", "a", "b"], "global", "exact", "differs between ranks 0 and 3"),
    "data differs": (["a", "b", "c", "c"], "dp", "derived", "differs between ranks 0 and 1"),
    "data coincides": (["a", "a", "a", "a"], "dp", "derived", "same on ranks 0 and 2"),
    "rank coincides": (["a", "b", "c", "a"], "rank", "derived", "same on ranks 0 and 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_streams_that_break_their_scope_are_an_error(name: str) -> None:
    prints, scope, how, message = WRONG[name]
    rows = [(*row, {"x": Outcome(how, "")}) for row in gathered(prints)]  # type: ignore[arg-type]
    with pytest.raises(anyrank.CheckpointError, match=message):
        check_scopes(rows, {"x": scope})


def test_what_was_saved_equal_may_be_equal() -> None:
    rows = [(*row, {"x": Outcome("exact", "")}) for row in gathered(["a", "b", "a", "b"])]
    check_scopes(rows, {"x": "rank"})


# -- damage ---------------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    """With the checksum of somebody who wants it to be read."""
    return body + blake2b(body, digest_size=16).digest()


def forged(**changes: Any) -> bytes:
    """A blob whose one stream, numpy's, says what it likes."""
    row = {"name": "numpy", "algorithm": "mt19937", "values": [5, 0, 0.0], "bytes": 2496}
    row.update(changes)
    head = json.dumps({"place": [0, 1, 0, 1], "torch": "2", "streams": [row]}).encode()
    return sealed(MAGIC + len(head).to_bytes(4, "little") + head + bytes(range(250)) * 10)


def test_the_forger_of_these_tests_can_write_a_good_one() -> None:
    assert restored(forged(), ONE)["numpy"].how == "exact"


HOSTILE = {
    "reads outside": forged(values=[625, 0, 0.0]),
    "reads before": forged(values=[-1, 0, 0.0]),
    "no numbers": forged(values=["a", 0, 0.0]),
    "too few": forged(values=[]),
    "short state": forged(bytes=2492),
    "long state": forged(bytes=2504),
    "negative": forged(bytes=-1),
    "huge": forged(bytes=2**70),
    "place of python": forged(name="python", values=[3, None], bytes=2500),
    "version of python": forged(name="python", values=[9, None], bytes=2500),
    "no list": sealed(MAGIC + (2).to_bytes(4, "little") + b"[]"),
    "deep": sealed(MAGIC + (60_000).to_bytes(4, "little") + b"[" * 60_000),
    "long table": sealed(MAGIC + b"\xff\xff\xff\xff{}"),
    "pickle": b"\x80\x04N.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_blob_changes_nothing(name: str) -> None:
    before = fingerprints({})
    try:
        outcomes = restored(HOSTILE[name], ONE)
    except anyrank.CorruptCheckpoint:
        assert fingerprints({}) == before
    else:  # of another length: as if another version had written it
        assert name == "short state"
        assert outcomes["numpy"].how == "derived"


@settings(deadline=None)
@given(st.data())
def test_a_torn_or_flipped_blob_is_noticed(data: Any) -> None:
    blob = capture(ONE, {})
    place = data.draw(st.integers(0, len(blob) - 1))
    flipped = bytearray(blob)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    for wrong in (bytes(flipped), blob[:place]):
        with pytest.raises(anyrank.CorruptCheckpoint, match="resume from another"):
            read_blob(wrong)


def test_damage_in_the_first_ranks_blob_is_noticed_on_all() -> None:
    blob = capture(ONE, {})
    with pytest.raises(anyrank.CorruptCheckpoint):
        restored(blob, ONE, blob[:-1])
