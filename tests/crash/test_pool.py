"""The rank pool: everything multi-process here stands on it, so it must neither hang nor lie."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from tests.scripts import is_running, our_frames, wait_for_the_end_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from anyrank import faults
from anyrank.testing import (
    Died,
    Fault,
    FaultNotReached,
    PeakMemory,
    RankPool,
    RanksFailed,
    call,
    pss_anon,
    rss_anon,
    run_ranks,
    server,
    worker,
)
from anyrank.testing.pool import LEAST_PORT

POINT = "test.point"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool that no other module uses, for tests that look at its processes.

    Its server starts three times, and has no need of the frameworks that other modules import.
    """
    with pytest.MonkeyPatch.context() as patch, RankPool(max_ranks=4) as made:
        patch.setattr(server, "PACKAGES", ("anyrank", "pytest"))
        yield made


class Answer(NamedTuple):
    """A type of this module, to cross the pipe both ways."""

    rank: int
    total: torch.Tensor


# -- jobs -----------------------------------------------------------------------------------------


def add_ranks(extra: torch.Tensor, *, factor: int = 1) -> Answer:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total * factor + extra)


def get_pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"no luck on {rank}")
    dist.barrier()


def fail_while_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no luck")
    sleep_long()


def sleep_long() -> None:
    time.sleep(100)


def hang_in_two_places() -> None:
    if dist.get_rank() == 1:
        sleep_long()
    dist.barrier()


def kill_self(rank: int, signum: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signum)
    dist.barrier()


def pass_point(times: int = 1) -> str:
    """What a rank sees when another fails at the point."""
    for _ in range(times):
        faults.point(POINT)
    try:
        dist.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "all there"


def pass_point_alone() -> str:
    faults.point(POINT)
    return "passed"


def change_everything(folder: str) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("PATH")
    os.chdir(folder)
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    dist.new_group([0])
    faults.armed["other"] = sleep_long


def read_everything() -> dict[str, Any]:
    return {
        "environment": os.environ.get("LEFT_BEHIND", "PATH" in os.environ),
        "cwd": os.getcwd(),
        "path": sys.path,
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": [kept for kept in warnings.filters if kept[:3] == ("error", None, Warning)],
        "group": dist.is_initialized(),
        "armed": dict(faults.armed),
        "random": (random.random(), torch.rand(()).item()),
    }


def shard_and_gather(num_groups: int) -> float:
    """DTensor and FSDP2 on a mesh whose groups get other names in each call."""
    for _ in range(num_groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))["a"]
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    table = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Shard(0)])
    return float((gradient.full_tensor().sum() + (table * 2).sum().full_tensor()).item())


def leave_thread(then: str = "return") -> None:
    threading.Thread(target=sleep_long, name="forgotten").start()
    if then == "raise":
        raise KeyError("first cause")


def leave_child() -> tuple[int, int]:
    """A process like the workers of a loader: daemons, which end with this one at the latest."""
    child = multiprocessing.get_context("fork").Process(target=sleep_long, daemon=True)
    child.start()
    assert child.pid is not None
    return os.getpid(), child.pid


def start_child() -> int:
    """A process that outlives the job, and a death that it has to share."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid


class Unreadable(Exception):
    """An exception that pickles, and fails to unpickle."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_unreadable() -> NoReturn:
    raise Unreadable(1, 2)


def return_lambda() -> Any:
    return lambda: 1


def measure_memory() -> tuple[int, int, int]:
    """Growth of RssAnon and of PSS over 64 MiB that are still there; peak over 64 that are not."""
    rss, pss = rss_anon(), pss_anon(os.getpid())
    kept = torch.ones(16 << 20)
    rss, pss = rss_anon() - rss, pss_anon() - pss
    del kept
    with PeakMemory() as peak:
        held = torch.ones(16 << 20)
        time.sleep(0.1)  # on a busy machine the sampling thread is not there at once
        del held
    assert peak.seconds >= 0.1
    return rss, pss, peak.peak_bytes


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank(world_size: int) -> None:
    results = run_ranks(world_size, add_ranks, torch.ones(1), factor=10)
    assert [type(result) for result in results] == [Answer] * world_size
    assert [result.rank for result in results] == list(range(world_size))
    expected = torch.tensor([10.0 * sum(range(world_size)) + 1])
    assert all(torch.equal(result.total, expected) for result in results)


def test_large_arguments_and_results_are_copied() -> None:
    sent = torch.arange(1 << 20, dtype=torch.float32)
    results = run_ranks(2, add_ranks, sent)
    assert torch.equal(results[1].total, sent + 1)
    results[0].total.zero_()
    assert sent[-1] == (1 << 20) - 1
    assert results[1].total[-1] == 1 << 20


def test_ranks_are_reused(pool: RankPool) -> None:
    two = pool.run(2, get_pid)
    four = pool.run(4, get_pid, init=False)
    assert four[:2] == two
    assert len(set(four)) == 4
    assert pool.run(1, get_pid) == two[:1]


def test_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_CALLER", "yes")
    results = run_ranks(
        3, read_environment, init=False, env={"EXTRA": "1", "LOCAL_WORLD_SIZE": "9"}
    )
    assert [result["RANK"] for result in results] == ["0", "1", "2"]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "1", "2"]
    names = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FROM_CALLER", "EXTRA"]
    assert [results[2][name] for name in names] == ["3", "9", "127.0.0.1", "yes", "1"]
    assert len({result["MASTER_PORT"] for result in results}) == 1
    # Else any connection of this machine may take it before rank 0 listens there.
    given_by_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert int(results[0]["MASTER_PORT"]) < given_by_system or given_by_system <= LEAST_PORT


def read_environment() -> dict[str, str]:
    return dict(os.environ)


def init_by_environment() -> int:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


def test_a_job_can_initialise_by_itself() -> None:
    assert run_ranks(2, dist.is_initialized, init=False) == [False, False]
    assert run_ranks(2, init_by_environment, init=False) == [2, 2]
    assert run_ranks(2, dist.is_initialized) == [True, True]


# -- state between calls --------------------------------------------------------------------------


def test_state_is_restored_between_calls(tmp_path: Path) -> None:
    before = run_ranks(2, read_everything, init=False)
    assert before[0] == before[1]
    assert before[0]["environment"] is True
    assert (before[0]["cwd"], before[0]["path"]) == (os.getcwd(), sys.path)
    run_ranks(2, change_everything, str(tmp_path))
    assert run_ranks(2, read_everything, init=False) == before


def test_meshes_of_earlier_calls_are_forgotten() -> None:
    # With names of groups that differ per call, a cached mesh would lead to a group that is gone.
    for num_groups, world_size in [(2, 2), (0, 2), (3, 4), (1, 4)]:
        results = run_ranks(world_size, shard_and_gather, num_groups)
        assert results == [8 * 8 * 2 + 240.0] * world_size


# -- failures -------------------------------------------------------------------------------------


def test_an_exception_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match=r"\[rank1\] KeyError: 'no luck on 1'") as caught:
        run_ranks(3, fail_on, 1, grace=10)
    # The others waited in a collective: the connections closed, nobody had to be killed.
    assert [type(caught.value.errors[rank]) for rank in (0, 2)] == [RuntimeError] * 2
    assert isinstance(caught.value.errors[1], KeyError)
    assert '[rank1]     raise KeyError(f"no luck on {rank}")' in str(caught.value)
    assert our_frames(str(caught.value)) == []


def test_ranks_that_hang_after_an_exception_are_killed(pool: RankPool) -> None:
    before = pool.run(3, get_pid)
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, fail_while_others_sleep, grace=0.5)
    assert list(caught.value.errors) == [1, 0, 2]
    assert isinstance(caught.value.errors[2], TimeoutError)
    assert "0.5 s after rank 1 failed" in str(caught.value.errors[2])
    assert set(caught.value.stacks) == {0, 2}
    assert all("in sleep_long" in stack for stack in caught.value.stacks.values())
    after = pool.run(3, get_pid)
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False]


def test_a_hang_ends_by_timeout_and_tells_where() -> None:
    run_ranks(2, get_pid)
    with pytest.raises(RanksFailed, match=r"TimeoutError: not finished within 1 s") as caught:
        run_ranks(2, hang_in_two_places, timeout=1)
    assert "in barrier" in caught.value.stacks[0]
    assert "in sleep_long" in caught.value.stacks[1]
    # Of a long output often only the end is kept.
    head, *ends = str(caught.value).splitlines()[-5:]
    assert head.startswith("Positions of the main threads")
    inner, own, sleeper, job = ends
    assert re.fullmatch(r"\[rank0\] .*distributed_c10d\.py:\d+ barrier", inner)
    assert re.fullmatch(r"\[rank0\] .*test_pool\.py:\d+ hang_in_two_places", own)
    assert re.fullmatch(r"\[rank1\] .*test_pool\.py:\d+ sleep_long", sleeper)
    assert re.fullmatch(r"\[rank1\] .*test_pool\.py:\d+ hang_in_two_places", job)
    assert run_ranks(2, pass_point) == ["all there"] * 2


def test_a_hang_is_told_in_a_folder_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a \u00e9 \u4e2d"
    folder.mkdir()
    (folder / "slow_jobs.py").write_text("import time\ndef sleep_long(): time.sleep(100)\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(1, importlib.import_module("slow_jobs").sleep_long, timeout=0.5)
    assert str(caught.value).endswith(f"[rank0] {folder}/slow_jobs.py:2 sleep_long")


def sleep_unseen() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sleep_long()


def test_a_rank_that_hangs_and_does_not_tell_where_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "STACK_SECONDS", 0.5)
    with pytest.raises(RanksFailed, match=r"within 0.5 s; killed; no stack trace after 0.5 s$"):
        run_ranks(1, sleep_unseen, timeout=0.5)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_reported_by_name_and_only_the_dead_are_replaced(
    pool: RankPool, signum: signal.Signals
) -> None:
    before = pool.run(3, get_pid)
    with pytest.raises(RanksFailed, match=f"killed by {signum.name}") as caught:
        pool.run(3, kill_self, 1, signum)
    assert isinstance(caught.value.errors[1], ChildProcessError)
    assert ("in kill_self" in caught.value.stacks.get(1, "")) == (signum == signal.SIGSEGV)
    after = pool.run(3, get_pid)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def fail_to_meet() -> str:
    """A failed init_process_group on rank 0 alone."""
    if os.environ["RANK"] == "0":
        nobody = dist.HashStore()
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=nobody, rank=0, world_size=2, timeout=timedelta(seconds=0.1)
            )
    return "alone"


def test_a_group_that_failed_to_form_does_not_disturb_the_next(pool: RankPool) -> None:
    before = pool.run(2, get_pid)
    assert pool.run(2, fail_to_meet, init=False) == ["alone"] * 2
    after = pool.run(2, get_pid)
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]


def test_a_job_begins_when_all_ranks_have_met(pool: RankPool) -> None:
    # Else a death at once finds others still connecting, which leaves them with half a group.
    before = pool.run(3, get_pid)
    for _ in range(20):
        with pytest.raises(RanksFailed, match="killed by SIGKILL") as caught:
            pool.run(3, kill_self, 1, signal.SIGKILL)
        assert "init_process_group" not in str(caught.value)
        assert pool.run(3, get_pid)[::2] == before[::2]


def test_no_job_runs_when_a_rank_cannot_be_set_up(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import os, pathlib", "assert os.environ.get('RANK') != '1', 'not here'"]
    lines += ["def job(file): pathlib.Path(file).touch()"]
    (tmp_path / "picky_jobs.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("picky_jobs").job
    with pytest.raises(RanksFailed, match="AssertionError: not here") as caught:
        pool.run(2, job, str(tmp_path / "ran"), init=False)
    assert list(caught.value.errors) == [1]
    assert not (tmp_path / "ran").exists()
    assert len(pool.run(2, get_pid)) == 2


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        run_ranks(1, sys.exit, 3)
    with pytest.raises(RanksFailed, match="exited with code 3"):
        run_ranks(1, functools.partial(getattr(os, "_exit"), 3))  # noqa: B009


def test_a_death_between_calls_is_healed(pool: RankPool) -> None:
    pids = pool.run(2, get_pid)
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while os.path.exists(f"/proc/{pids[0]}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = pool.run(2, get_pid)
    assert again[0] != pids[0]
    assert again[1] == pids[1]


def test_the_end_of_the_server_is_an_error_and_the_next_call_works(pool: RankPool) -> None:
    pool.run(1, get_pid)
    assert pool._server is not None
    pool._server.process.kill()
    pool._server.process.wait(10)
    with pytest.raises(RuntimeError, match="fork server ended with code -9"):
        pool.run(1, get_pid)
    assert len(pool.run(1, get_pid)) == 1


def test_an_interrupted_call_leaves_nothing_behind(pool: RankPool) -> None:
    pids = pool.run(2, get_pid)
    # A shell that starts this in the background leaves SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, sleep_long)
    finally:
        signal.signal(signal.SIGINT, before)
    # That they have ended shows that nobody waited for their results.
    assert not any(is_running(pid) for pid in pids)
    assert len(pool.run(2, get_pid)) == 2


def test_exceptions_and_results_that_do_not_pickle_are_reported() -> None:
    with pytest.raises(RanksFailed, match="Unreadable: 1 and 2") as caught:
        run_ranks(1, raise_unreadable)
    assert isinstance(caught.value.errors[0], RuntimeError)
    with pytest.raises(RanksFailed, match=r"[Cc]an't (pickle|get) .*lambda"):
        run_ranks(1, return_lambda)


def test_a_thread_left_behind_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"threads of the job still run: \['forgotten'\]"):
        pool.run(1, leave_thread)
    assert pool.run(1, threading.active_count) == [1]
    with pytest.raises(RanksFailed, match="first cause"):
        pool.run(1, leave_thread, then="raise")
    assert pool.run(1, threading.active_count) == [1]


def test_a_child_left_behind_is_ended(pool: RankPool) -> None:
    (rank, child), *_ = pool.run(1, leave_child)
    assert not is_running(child)
    assert pool.run(1, get_pid) == [rank]


def leave_group(limit_seconds: float) -> int:
    """A group that outlives the job, whose thread may take so much CPU time."""
    worker.SPIN_SECONDS = limit_seconds
    left.append(dist.new_group())
    return os.getpid()


left: list[Any] = []


def threads_of_a_group() -> list[str]:
    """The kernel's names of this process's threads while it has a group, gloo's among them if torch
    gives it one: it takes its name when it first runs.
    """
    group = dist.new_group()
    names = list[str]()
    for _ in range(40):
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
        if GLOOS_THREAD in names:
            break
        time.sleep(0.05)
    dist.destroy_process_group(group)
    return names


GLOOS_THREAD = "gloo_tcp_loop"


def test_a_rank_in_which_a_left_group_spins_is_replaced(pool: RankPool) -> None:
    if GLOOS_THREAD not in pool.run(1, threads_of_a_group)[0]:
        pytest.skip(f"torch {torch.__version__} does not name gloo's threads, which it looks for")
    pids = pool.run(2, leave_group, 60.0)
    assert pool.run(2, leave_group, -1.0) == pids
    assert not set(pool.run(2, get_pid)) & set(pids)


def drop_model_after_group() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(3, 2)).sum().backward()
    leave_a_busy_thread()
    dist.destroy_process_group()
    del model


def leave_a_busy_thread() -> None:
    """Keep a thread of the default group, gloo's, in need of Python's lock for a second. All ranks.

    A collective that a backward has started holds the context of that backward, and is freed by the
    thread that ran it.
    """
    begun = threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            time.sleep(1)

    slow: ContextVar[Slow | None] = ContextVar("slow", default=None)
    slow.set(Slow())
    leaf = torch.ones(1, requires_grad=True)

    def reduce(_: torch.Tensor) -> None:
        dist.all_reduce(torch.ones(10_000_000), async_op=True)

    leaf.register_hook(reduce)
    (leaf * 1).backward()
    slow.set(None)
    assert begun.wait(60)


def test_a_model_may_be_dropped_after_its_group(pool: RankPool) -> None:
    for _ in range(2):  # torch itself keeps the first group of a process
        pool.run(2, drop_model_after_group, timeout=30)


def test_wrong_calls_are_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="world_size=5: must be between 1 and max_ranks=4"):
        pool.run(5, get_pid)
    with pytest.raises(ValueError, match="function at the top level of a module"):
        pool.run(1, lambda: 1)
    with pytest.raises(ValueError, match=r"only 1 rank$"):
        pool.run(1, get_pid, faults=[Fault(1, POINT, "kill")])


# -- faults ---------------------------------------------------------------------------------------


def test_survivors_of_a_kill_tell_what_they_saw(pool: RankPool) -> None:
    before = pool.run(3, get_pid)
    results = pool.run(3, pass_point, 2, faults=[Fault(1, POINT, "kill", nth=2)])
    assert results == ["RuntimeError", Died("SIGKILL", POINT), "RuntimeError"]
    after = pool.run(3, get_pid)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_a_stopped_rank_waits_until_the_others_are_done() -> None:
    results = run_ranks(2, pass_point_alone, faults=[Fault(0, POINT, "stop")])
    assert results == [Died("SIGSTOP", POINT), "passed"]
    assert run_ranks(2, pass_point) == ["all there"] * 2


def test_survivors_that_hang_after_a_kill_are_a_failure() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, pass_point, timeout=1, faults=[Fault(0, POINT, "stop")])
    assert list(caught.value.errors) == [1]
    assert "in pass_point" in caught.value.stacks[1]


def test_a_slow_rank_is_slow() -> None:
    start = time.monotonic()
    fault = Fault(1, POINT, "slow", seconds=0.7)
    assert run_ranks(2, pass_point, faults=[fault]) == ["all there"] * 2
    assert time.monotonic() - start > 0.7


def test_a_fault_that_is_never_reached_is_a_failure() -> None:
    with pytest.raises(FaultNotReached, match="nth=2") as caught:
        run_ranks(2, pass_point_alone, faults=[Fault(0, POINT, "kill", nth=2)])
    assert caught.value.results == ["passed", "passed"]


# -- where jobs come from -------------------------------------------------------------------------


def run_python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, timeout=200, check=False, capture_output=True, text=True
    )


def said(stderr: str) -> str:
    """What a script wrote, without what triton in CUDA builds of torch adds when it ends."""
    return stderr.partition("nanobind: leaked")[0]


def test_the_ranks_of_a_script_end_with_it(tmp_path: Path) -> None:
    jobs = """
        import os, pathlib, signal, time
        import torch.distributed as dist

        def kill_owner(owner):
            pathlib.Path(f"pid{os.getpid()}").touch()
            dist.barrier()
            os.kill(owner, signal.SIGKILL)
            time.sleep(100)
    """
    script = """
        import os
        from anyrank.testing import run_ranks
        from jobs_of_a_script import kill_owner

        if __name__ == "__main__":
            run_ranks(2, kill_owner, os.getpid())
    """
    (tmp_path / "jobs_of_a_script.py").write_text(textwrap.dedent(jobs))
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = run_python("script.py", cwd=tmp_path)
    assert (done.stdout, said(done.stderr)) == ("", "")
    assert done.returncode == -signal.SIGKILL
    pids = [int(file.name.removeprefix("pid")) for file in tmp_path.glob("pid*")]
    assert len(pids) == 2
    wait_for_the_end_of(pids)


def test_a_file_that_starts_ranks_where_they_import_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import os", "from anyrank.testing import run_ranks", "def job(): pass"]
    lines += ["if 'RANK' in os.environ:", "    run_ranks(2, job)"]
    (tmp_path / "starting_jobs.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RanksFailed, match=r"module of starting_jobs.job starts .* call under `if __name__ =="
    ):
        run_ranks(1, importlib.import_module("starting_jobs").job)


def test_a_job_of_a_script_or_a_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = types.ModuleType("__main__")
    prompt.job = types.FunctionType(get_pid.__code__, vars(prompt))
    prompt.job.__qualname__ = "job"
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    with pytest.raises(ValueError, match="Define the job in a module, and import it"):
        run_ranks(1, prompt.job)


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_measured(pool: RankPool) -> None:
    size = 64 << 20
    for measured in pool.run(1, measure_memory, init=False)[0]:
        assert 0.9 * size < measured < 1.2 * size


# -- the end --------------------------------------------------------------------------------------


# Last, as the module's pool would take seconds to start again.
def test_closing_ends_all_that_ranks_started(pool: RankPool) -> None:
    pids = [*pool.run(2, start_child), *pool.run(2, get_pid)]
    folder = pool._folder
    pool.close()
    wait_for_the_end_of(pids)
    assert not folder.exists()
