"""Promise 4: one rank's error is every rank's error, within seconds, naming the rank and the
cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.testing import Died, Fault, run_ranks
from anyrank.world.ranks import open_ranks

SECONDS = 60.0  # on a busy machine; without a name it takes half an hour
WEIGHTS = {"0.weight": torch.randn(8, 8), "0.bias": torch.zeros(8)}


def outcome(work: Callable[[], Any]) -> tuple[str, str, dict[int, str], float]:
    """Class, message, causes and seconds of the error that the work ends in."""
    start = time.monotonic()
    try:
        result = work()
    except anyrank.AnyrankError as error:
        return type(error).__name__, str(error), error.causes, time.monotonic() - start
    return "no error", str(result), {}, time.monotonic() - start


def agreed(results: list[Any]) -> tuple[str, str, dict[int, str]]:
    """The one error of all ranks."""
    assert all(result[:3] == results[0][:3] for result in results), results
    assert all(result[3] < SECONDS for result in results), results
    return results[0][:3]


def job_together(failing: dict[int, str]) -> Any:
    rank = torch.distributed.get_rank()

    def work() -> int:
        if rank in failing:
            kind: Any = getattr(anyrank, failing[rank], None) or ValueError
            raise kind(f"rank {rank} had enough")
        return rank * 10

    def all_of_it() -> list[int]:
        with open_ranks() as ranks:
            return ranks.run_and_gather("counting", lambda: (None, work()))[1]

    return outcome(all_of_it)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_without_a_failure_every_rank_has_all_results(world: int) -> None:
    for kind, text, _, _ in run_ranks(world, job_together, {}):
        assert (kind, text) == ("no error", str([rank * 10 for rank in range(world)]))


@pytest.mark.parametrize(
    ("failing", "kind", "causes"),
    [
        ({2: "LoadError"}, "LoadError", {2: "rank 2 had enough"}),
        ({1: "ValueError"}, "RankError", {1: "ValueError: rank 1 had enough"}),
        (
            {1: "UnsafeFile", 3: "LoadError"},
            "UnsafeFile",
            {1: "rank 1 had enough", 3: "rank 3 had enough"},
        ),
    ],
)
def test_a_rank_that_fails_fails_all_with_its_class(
    failing: dict[int, str], kind: str, causes: dict[int, str]
) -> None:
    found, text, told = agreed(run_ranks(4, job_together, failing))
    assert (found, told) == (kind, causes)
    said = "".join(f"\n[rank {rank}] {cause}" for rank, cause in causes.items())
    assert text == f"counting failed on {len(causes)} of 4 ranks, so every rank stops:{said}"


def job_meet(times: int) -> None:
    for _ in range(times):
        with open_ranks():
            pass


def test_a_rank_that_leaves_at_once_does_not_break_a_slower_one() -> None:
    """As a loop over a loader does that ends before its first collective."""
    run_ranks(4, job_meet, 60)


def job_alike(kind: str) -> Any:
    def fail() -> None:
        raise getattr(anyrank, kind, ValueError)("enough")

    def all_of_it() -> None:
        with open_ranks() as ranks:
            ranks.run("counting", fail)

    return outcome(all_of_it)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("ValueError", "counting failed on every rank: ValueError: enough"), ("LoadError", "enough")],
)
def test_what_all_ranks_raise_alike_is_said_once_and_says_where(kind: str, text: str) -> None:
    result = agreed(run_ranks(2, job_alike, kind))
    assert result[1] == text
    assert set(result[2]) == {0, 1}


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width))


def job_load(path: str, change: str, strategy: str) -> Any:
    """Load in a way that goes wrong on the last rank; also the model, to see that it is
    unchanged.
    """
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with anyrank.meta():
        model = net(9 if change == "model" and last else 8)
    source: Any = path
    if change == "path" and last:
        source = path + ".not-here"
    if change == "memory":
        source = WEIGHTS if last else {**WEIGHTS, "0.bias": torch.zeros(9)}
    missing: Any = "init" if change == "options" and last else "error"
    result = outcome(lambda: anyrank.load(model, source, strategy=strategy, missing=missing))
    assert all(p.is_meta for p in model.parameters()), "the model was touched"
    return result


@pytest.fixture
def path(tmp_path: Any) -> str:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    return str(tmp_path / "w.safetensors")


def test_ranks_with_different_models(path: str) -> None:
    kind, text, _ = agreed(run_ranks(3, job_load, path, "model", "own"))
    assert kind == "LoadError"
    assert "[rank 2]" in text
    assert "0.weight: the model has shape [9, 9], the source [8, 8]" in text


def test_ranks_with_different_sources(path: str) -> None:
    kind, text, _ = agreed(run_ranks(3, job_load, path, "path", "own"))
    assert kind == "LoadError"
    assert f"rank 0 ({path!r}) and rank 2 ({path + '.not-here'!r})" in text


def test_ranks_with_different_tables(path: str) -> None:
    kind, text, _ = agreed(run_ranks(2, job_load, path, "memory", "own"))
    assert kind == "LoadError"
    assert "0.bias" in text


@pytest.mark.parametrize("strategy", ["own", "stripe", "scatter"])
@pytest.mark.parametrize("how", ["raise", "enospc"])
def test_a_disk_error_in_the_middle(path: str, strategy: str, how: str) -> None:
    rank = 0 if strategy == "scatter" else 1
    fault = Fault(rank=rank, point="load.read", how=how)
    kind, text, causes = agreed(run_ranks(3, job_load, path, "", strategy, faults=[fault]))
    assert kind in ("LoadError", "RankError")
    assert list(causes) == [rank], text


@pytest.mark.parametrize("strategy", ["own", "stripe"])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_is_named(path: str, strategy: str, victim: int) -> None:
    point = "load.read" if strategy == "own" else "load.exchange"
    fault = Fault(rank=victim, point=point, how="kill")
    results = run_ranks(3, job_load, path, "", strategy, faults=[fault])
    assert isinstance(results[victim], Died)
    for rank, result in enumerate(results):
        if rank != victim:
            kind, text, causes, seconds = result
            assert kind == "RankError"
            assert f"rank {victim}" in text.split("(")[0], text
            assert list(causes) == [victim]
            assert seconds < SECONDS + 3


def test_a_rank_that_hangs_is_named_within_the_timeout(path: str) -> None:
    fault = Fault(rank=1, point="load.read", how="stop")
    env = {"ANYRANK_TIMEOUT_SEC": "2"}
    results = run_ranks(3, job_load, path, "", "own", faults=[fault], env=env)
    assert isinstance(results[1], Died)
    for rank in (0, 2):
        kind, text, causes, seconds = results[rank]
        assert kind == "RankError"
        assert text.startswith("rank 1 did not reach 'reading the weights' within 2 s")
        assert list(causes) == [1]
        assert seconds < 2 + SECONDS + 3
