"""Promise 4 where ranks meet and wait: groups, calls and arguments that differ, ranks that do not
come, and ends of processes with everything still open.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.spies import warnings_of
from torch import nn

import anyrank
from anyrank import faults
from anyrank.testing import Fault, run_ranks
from anyrank.training.data.order import Order
from anyrank.world import waits
from anyrank.world.ranks import open_ranks

WEIGHTS = {"weight": torch.ones(3, 3), "bias": torch.zeros(3)}
SECONDS = 60.0  # on a busy machine; without a name it takes half an hour


def load(**options: Any) -> None:
    model = nn.Linear(3, 3)
    anyrank.load(model, WEIGHTS, **options)
    assert torch.equal(model.weight, WEIGHTS["weight"])


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    """Class and message of the error that the work ends in, within seconds."""
    start = time.monotonic()
    try:
        work()
    except Exception as error:
        assert time.monotonic() - start < SECONDS
        return type(error).__name__, str(error)
    return "no error", ""


@contextlib.contextmanager
def impatient() -> Generator[None]:
    """Warn after half a second instead of ten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "WARN_SEC", 0.5)
        patch.setattr(waits, "POLL_SEC", 0.1)
        yield


# -- groups ---------------------------------------------------------------------------------------


def job_groups() -> None:
    dist.new_group([0, 1])
    pair = dist.new_group([1, 2])
    for _ in range(5):
        if dist.get_rank():
            load(process_group=pair)
    load()


def test_ranks_may_be_in_different_numbers_of_groups_and_call_them_often() -> None:
    run_ranks(3, job_groups)


def job_stages(path: str) -> None:
    """A pipeline: each stage loads its own layers, the second one twice; then all make a call."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    part = nn.ModuleDict({str(stage): nn.Linear(3, 3)})
    for _ in range(1 + stage):
        report = anyrank.load(
            part, path, unexpected="ignore", strategy="stripe", process_group=stages[stage]
        )
        assert len(report.bytes_read) == 2
        assert sum(report.bytes_read) == 4 * (9 + 3)
    for name, value in part.state_dict().items():
        assert torch.equal(value, torch.load(path)[name])
    load()
    with open_ranks() as ranks:
        assert ranks.gather("exchanging values", stage) == [0, 0, 1, 1]


def test_stages_of_a_pipeline_load_their_parts_and_then_meet(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict(), path)
    run_ranks(4, job_stages, path, timeout=60)


def job_alone() -> list[int]:
    rank = dist.get_rank()
    model = nn.Linear(3, 3)
    if rank == 0:
        anyrank.load(model, WEIGHTS, process_group=anyrank.ALONE)
        anyrank.plan(model, WEIGHTS, process_group=anyrank.ALONE)
        with anyrank.meta():
            hollow = nn.Linear(3, 3)
        anyrank.materialize(hollow, process_group=anyrank.ALONE)
    with open_ranks(anyrank.ALONE) as ranks:
        return [rank, *ranks.ranks, *ranks.gather("exchanging values", rank)]


def test_one_rank_can_call_alone() -> None:
    assert run_ranks(2, job_alone) == [[0, 0, 0], [1, 1, 1]]


def job_loader_alone() -> int:
    loader = anyrank.ElasticLoader(
        torch.zeros(4, 1), global_batch=2, microbatch=1, process_group=anyrank.ALONE
    )
    model = nn.Linear(1, 1)
    return sum(len(list(step.microbatches(model))) for step in loader)


def test_each_rank_can_take_all_the_data_alone() -> None:
    assert run_ranks(2, job_loader_alone) == [4, 4]


# -- the default device ---------------------------------------------------------------------------


def job_default_device(how: str, folder: str) -> bool:
    model = nn.Linear(3, 3)
    if how == "set":
        torch.set_default_device("meta")
        use(model, folder)
        torch.set_default_device(None)
    else:
        with torch.device("meta"):
            use(model, folder)
    return torch.equal(model.get_parameter("weight"), WEIGHTS["weight"])


def use(model: nn.Module, folder: str) -> None:
    """What has tensors of its own in it, under a default device on which none may be."""
    anyrank.load(model, WEIGHTS, strategy="stripe", verify=True)
    assert Order(8, 0, True).ids(0, 0, 8).sum() == 28
    with anyrank.Checkpoints(folder, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
        nn.init.zeros_(model.get_parameter("weight"))
        ckpts.resume()


def job_materialize_under_a_default_device() -> torch.Tensor:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
        torch.manual_seed(0)
        anyrank.materialize(model, device="cpu")
    return model.weight.detach()


def test_materialize_does_not_use_the_default_device() -> None:
    torch.manual_seed(0)
    with anyrank.meta():
        model = nn.Linear(3, 3)
    anyrank.materialize(model, device="cpu")
    for weight in run_ranks(2, job_materialize_under_a_default_device):
        assert torch.equal(weight, model.weight)


@pytest.mark.parametrize("how", ["set", "with"])
def test_a_default_device_is_nothing_to_anyrank(how: str, tmp_path: Path) -> None:
    assert run_ranks(2, job_default_device, how, str(tmp_path / "run")) == [True, True]


# -- calls and arguments that differ --------------------------------------------------------------


def job_differs(name: str, values: tuple[Any, ...]) -> tuple[str, str]:
    return outcome(lambda: load(**{name: values[dist.get_rank()]}))


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("strategy", ("stripe", "own", "own"), "'stripe' on rank 0, 'own' on ranks 1, 2"),
        ("verify", (False, False, True), "False on ranks 0, 1, True on rank 2"),
        ("missing", ("error", "init", "error"), "'error' on ranks 0, 2, 'init' on rank 1"),
        ("rename", ({"a": "b"}, None, None), "{'a': 'b'} on rank 0, None on ranks 1, 2"),
    ],
)
def test_an_argument_that_differs_is_named(name: str, values: tuple[Any, ...], text: str) -> None:
    for kind, message in run_ranks(3, job_differs, name, values):
        assert kind == "LoadError"
        assert (
            message
            == f"load(): {name}= differs between ranks: {text}. Pass the same value on every rank."
        )


# -- ranks that do not come -----------------------------------------------------------------------


def wait_for(late: float, where: str) -> None:
    """A later call, the first one, and work within one."""
    if where == "reading":
        with open_ranks() as ranks:
            ranks.run("reading", lambda: time.sleep(late))
        return
    time.sleep(late)
    if where == "load()":
        load()
    else:
        with open_ranks(call=where):
            pass


def job_late(where: str, absent: int) -> tuple[list[str], float]:
    if where == "load()":
        load()  # what a first call imports takes seconds where the machine is busy
    dist.barrier()
    start = time.monotonic()
    with impatient(), warnings_of("anyrank.world") as found:
        wait_for(2.0 if dist.get_rank() == absent else 0.0, where)
    return found, time.monotonic() - start


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("where", ["load()", "test()", "reading"])
def test_a_rank_that_is_waited_for_is_named_on_every_waiting_rank(where: str, absent: int) -> None:
    for rank, (found, seconds) in enumerate(run_ranks(3, job_late, where, absent)):
        if rank == absent:
            # On a busy machine it may wait for another, in its turn.
            assert not any(f" s for rank {absent}:" in text for text in found)
        else:
            assert found[0].startswith(f"{where}: rank {rank} has waited ")
            assert any(
                f" s for rank {absent}. Every rank must make the same calls" in text
                for text in found
            )
            assert "process_group=anyrank.ALONE" in found[0]
            # After half a second, one, two, and so on
            assert 1 <= len(found) <= 1 + math.log2(seconds / 0.5)


def job_left() -> tuple[str, str]:
    with impatient():
        if dist.get_rank() == 2:
            time.sleep(4.0)
            return "", ""
        return outcome(load)


def test_a_rank_that_leaves_before_all_have_met_is_named_in_seconds() -> None:
    fault = Fault(rank=1, point="ranks.meet", how="raise", nth=3)
    results = run_ranks(3, job_left, faults=[fault])
    kind, text = results[0]
    assert kind == "RankError"
    assert text.startswith("rank 1 gave up in 'load()': ")


def job_ends_between_calls(absent: int) -> tuple[str, str]:
    load()
    with impatient():
        if dist.get_rank() == absent:
            faults.point("ranks.test")
        found = outcome(load)
        assert outcome(load) == found  # nor does a later call wait for it
        return found


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_ended_before_the_call_is_named_in_seconds(absent: int) -> None:
    fault = Fault(rank=absent, point="ranks.test", how="kill")
    results = run_ranks(3, job_ends_between_calls, absent, faults=[fault])
    for rank in {0, 1, 2} - {absent}:
        kind, text = results[rank]
        assert kind == "RankError"
        assert text.startswith(f"rank {absent} died or stopped responding")


def test_a_busy_rank_is_not_taken_for_dead() -> None:
    fault = Fault(rank=2, point="ranks.test", how="kill")
    results = run_ranks(3, job_killed, faults=[fault])
    for rank in (0, 1):
        assert results[rank][0] == "RankError"
        assert results[rank][1].startswith("rank 2 died or stopped responding")


def job_killed() -> tuple[str, str]:
    with open_ranks() as ranks:
        faults.point("ranks.test")
        if ranks.rank == 0:
            time.sleep(4.0)  # computes, beside all agreement
        return outcome(lambda: ranks.gather("exchanging values", 1))


# -- ends of processes ----------------------------------------------------------------------------

OPEN_AT_EXIT = r"""
import os, signal, sys, torch, torch.distributed as dist, anyrank, anyrank.world.ranks
store, folder = sys.argv[1:3]
ranks = {}
for how in ("left", "destroyed"):  # each in processes of its own, which end as any other
    for rank in range(2):
        if not (child := os.fork()):
            break
        ranks[child] = how, rank
    else:
        continue
    break
else:
    for child, (how, rank) in ranks.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"{how} {rank} {code}\n".encode())  # whole lines of several processes
    sys.exit()
signal.alarm(200)
store, folder = f"{store}-{how}", f"{folder}/{how}"
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
torch.manual_seed(0)  # the ranks hold replicas
model = torch.nn.Linear(1, 1)
loader = anyrank.ElasticLoader(torch.ones(8, 1), global_batch=4, microbatch=1)
steps = iter(loader)
step = next(steps)
with anyrank.world.ranks.open_ranks() as ranks:
    ranks.gather("exchanging values", rank)
held = anyrank.world.ranks.open_ranks()
kept = held.__enter__()
ckpts = anyrank.Checkpoints(folder + "/run", anyrank.TrainState(model), background=True)
ckpts.save()
if how == "destroyed":
    dist.destroy_process_group()
os.write(1, b"last line\n")
"""


def test_a_process_ends_with_groups_still_open(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "store"), str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OPEN_AT_EXIT, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    ended = [f"{how} {rank} 0" for how in ("left", "destroyed") for rank in range(2)]
    assert sorted(run.stdout.splitlines()) == sorted([*ended, *["last line"] * 4]), run.stderr
    saved = [tmp_path / how / "run/step-00000000/anyrank.json" for how in ("left", "destroyed")]
    assert all(path.exists() for path in saved)  # in the background


ONE_DIES = """
import os, signal, sys
import torch.distributed as dist
import anyrank
from anyrank.world.ranks import open_ranks

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=4)
with open_ranks(call="test()") as ranks:
    ranks.gather("exchanging values", rank)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.gather("exchanging values", rank)
    except anyrank.RankError:
        sys.exit(7)
"""


def test_who_survives_a_rank_ends_as_its_script_says(tmp_path: Path) -> None:
    """And not by SIGABRT of a thread that is within gloo while the interpreter ends."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ONE_DIES, str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [7, 7, 7, -9], said
