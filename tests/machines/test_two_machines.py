"""Promises 4 and 6 between machines: a cut cable, a dead machine, a clock that is wrong, a slow
network, a folder that only one machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.machines.machines import Machines, namespace_of_this_user, reason_not_to

REASON = reason_not_to()
if REASON and namespace_of_this_user():
    REASON = "tried in namespaces of this user's own, by test_without_root.py"
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
TIMEOUT_SEC = 4
MARGIN_SEC = 90  # for a roll call, and for the machine that runs all of this


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path) as made:
        yield made


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(64, 64), "bias": torch.zeros(64)}, path)
    return str(path)


@pytest.mark.parametrize("job", ["save_for_ever", "load_for_ever"])
def test_a_cut_cable_ends_the_call_on_both_sides(
    machines: Machines, tmp_path: Path, weights: str, job: str
) -> None:
    folder = tmp_path if job == "load_for_ever" else tmp_path / "run"
    folder.mkdir(exist_ok=True)
    argument = weights if job == "load_for_ever" else str(folder)
    machines.start(job, argument, ANYRANK_TIMEOUT_SEC=str(TIMEOUT_SEC))
    for rank in (0, 1):
        machines.wait_for(folder / f"going-{rank}")
    machines.cut()
    for rank, result in enumerate(machines.finish()):
        assert result["error"] == "RankError", result
        assert result["seconds"] < TIMEOUT_SEC + MARGIN_SEC, result
        # Cut while ranks meet, what is known of the store's machine is its address.
        names = (["machine1"], ["machine0", "10.77.0.1"])[rank]
        assert any(name in result["text"] for name in names), result


def test_a_dead_machine_is_named_and_the_other_goes_on_alone(
    machines: Machines, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    machines.start("save_for_ever", str(folder), ANYRANK_TIMEOUT_SEC="20")
    machines.wait_for(folder / "going-1")
    machines.kill(1)
    first = machines.finish()[0]
    assert first["error"] == "RankError", first
    assert (
        "rank 1 on machine1 died or stopped responding: machine1 is down or unreachable"
        in first["text"]
    )
    machines.start("resume", str(folder), on=0)
    before, after, saved_on = machines.finish()[0]["value"]
    assert before >= 2
    assert after == before + 1
    assert saved_on == 2


def test_clocks_that_differ_by_an_hour(machines: Machines, tmp_path: Path, weights: str) -> None:
    machines.start("trips", weights, str(tmp_path), CLOCKS_AHEAD_SEC="3600 -3600")
    for results in machines.finish():
        for result in results:
            assert result.get("value") == [64.0 * 64, [6, 5], 6], result


def test_a_second_run_on_another_machine_is_refused(machines: Machines, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    machines.start("hold_lock", str(folder), on=0)
    machines.wait_for(folder / "held")
    holder = machines.running.pop(0)
    machines.start("take_lock", str(folder), on=1)
    result = machines.finish()[1]
    holder.join(180)
    assert holder.exitcode == 0
    assert result["error"] == "CheckpointError", result
    assert "another run is writing to this folder" in result["text"], result
    assert "on machine0" in result["text"], result


def test_a_slow_network(tmp_path: Path, weights: str) -> None:
    with Machines(tmp_path, delay_sec=0.05) as machines:  # each way: 100 ms for an answer
        machines.start("trips", weights, str(tmp_path))
        for (result,) in machines.finish():
            assert result.get("value") == [64.0 * 64, [6, 5], 6], result


def test_a_run_folder_that_one_machine_does_not_see(machines: Machines) -> None:
    machines.start("local_folder")
    for result in machines.finish():
        assert result["error"] == "CheckpointError", result
        assert "machine1 cannot see" in result["text"], result
        assert "storage that is shared by all machines" in result["text"], result


@pytest.mark.parametrize(("victim", "machine"), [(0, 0), (4, 0), (10, 1), (19, 1)])
def test_one_of_twenty_ranks_on_two_machines_is_named_by_all_others(
    tmp_path: Path, victim: int, machine: int
) -> None:
    """The first rank has the store as well; rank 10 is the one that the second machine hangs on."""
    with Machines(tmp_path, ranks_each=10) as machines:
        machines.start("agree_for_ever", str(tmp_path), ANYRANK_TIMEOUT_SEC="60")
        for rank in range(20):
            machines.wait_for(tmp_path / f"going-{rank}")
        machines.kill_rank(victim)
        results = machines.finish()
    others = [result for rank, result in enumerate(results) if rank != victim]
    texts = {(result["error"], result["text"]) for result in others}
    assert len(texts) == 1, texts
    ((error, text),) = texts
    assert error == "RankError"
    assert text.startswith(f"rank {victim} on machine{machine} died or stopped responding")
