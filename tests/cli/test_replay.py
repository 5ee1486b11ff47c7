"""`anyrank run --replay`: the same bits are found equal, and what differs is named."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from tests.scripts import TORCHRUN, job_script

from anyrank.cli import main, run
from anyrank.testing import RanksFailed, run_ranks

# The same program trains the run here, in this process, and is replayed on ranks of the pool. What
# starts torchrun, with variables and with the flags of several machines, is tested in test_run*.py.
SCRIPT = """
import os, sys, pathlib, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import anyrank

def main(steps, exact=True, folder="runs/a"):
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = torch.linspace(-1, 1, 96).view(24, 4)
    loader = anyrank.ElasticLoader(data, global_batch=8, microbatch=2, exact=exact)
    state = anyrank.TrainState(net, optimizer, data=loader)
    # Background saves and a short retention: a replay has neither.
    with anyrank.Checkpoints(folder, state, every=1, keep=5, background=True) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=steps):
            for batch in step.microbatches(net):
                loss = net(batch).square().mean()
                if step.number == FAULT_AT:
                    loss = loss * FAULT
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    pathlib.Path("ended").write_text("")

FAULT_AT, FAULT = 4 if "FAULT" in os.environ else -1, 2.0  # of the fifth step
if os.environ.get("FAULT") == "each":  # another error in each process
    FAULT = 1 + time.monotonic() % 1
if os.environ.get("FAULT") == "once" and os.path.exists("erred"):
    FAULT = 1.0
pathlib.Path("erred").write_text("")
if __name__ == "__main__":
    main(int(sys.argv[1]), folder=sys.argv[2])
"""


@pytest.fixture
def train(anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the script, and trains `runs/a` with it in this process, on one rank."""
    del anyrank  # it changes to an empty folder
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    Path("train.py").write_text(SCRIPT)

    def call(steps: int, exact: bool = True, folder: str = "runs/a") -> None:
        threads = torch.get_num_threads()
        space = {"__name__": "train"}
        exec(compile(SCRIPT, "train.py", "exec"), space)  # noqa: S102 - our own
        space["main"](steps, exact, folder)  # type: ignore[operator]
        torch.set_num_threads(threads)
        Path("ended").unlink()

    return call


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is started on ranks of the pool, and not by torchrun."""

    def run_once(ranks: int, script: str, arguments: Any, _: Any, variables: Any) -> Any:
        env = {**TORCHRUN, **variables}
        try:
            ended = run_ranks(ranks, job_script, script, arguments, init=False, env=env)
        except RanksFailed as error:
            print(error, file=sys.stderr)
            return run.Attempt(ranks, 1, 0.0), False
        return run.Attempt(ranks, max(code for code, _ in ended), 0.0), False

    monkeypatch.setattr(run, "run_once", run_once)


def content(folder: str) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.usefixtures("quick_start")
def test_steps_trained_again_on_two_ranks_have_the_same_bits(
    train: Callable[..., None], snapshot: Callable[[str, str], Result]
) -> None:
    train(7)
    before = content("runs/a")
    line = "run --replay runs/a --from 3 --to 6 --ranks 2 train.py 7 runs/a"
    assert snapshot("replay_equal", line).exit_code == 0
    assert content("runs/a") == before
    assert not Path("ended").exists()  # the script ends at step 6


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("kind", ["always", "each", "once"])
def test_a_step_that_differs_is_named_and_replayed_once_more(
    kind: str,
    train: Callable[..., None],
    snapshot: Callable[[str, str], Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(6)
    before = content("runs/a")
    Path("erred").unlink()
    monkeypatch.setenv("FAULT", kind)
    line = "run --replay runs/a --from 3 train.py 6 runs/a"
    assert snapshot(f"replay_differs_{kind}", line).exit_code == 1
    assert content("runs/a") == before


def job_machine(line: list[str], ports: list[str]) -> tuple[int, str]:
    """The command on one of several machines, whose only rank is this process."""

    def run_here(_: int, script: str, arguments: Any, machines: Any, variables: Any) -> Any:
        given = (machines["nnodes"], machines["node_rank"])
        assert given == (os.environ["WORLD_SIZE"], os.environ["RANK"])
        os.environ.update({**TORCHRUN, **variables, "MASTER_PORT": ports.pop()})
        code, _ = job_script(script, arguments)
        dist.destroy_process_group()
        return run.Attempt(1, code, 0.0), False

    node = f"--node-rank={os.environ['RANK']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_once", run_here)
        result = CliRunner().invoke(main, ["run", *line, node, "train.py", "6", "runs/a"])
    return result.exit_code, result.stdout


def free_ports(number: int) -> list[str]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def test_every_machine_of_a_replay_finds_the_same(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(6)
    before = content("runs/a")
    monkeypatch.setenv("FAULT", "always")
    line = ["--replay=runs/a", "--from=3", "--json", "--ranks=1", "--nnodes=2"]
    machines = run_ranks(2, job_machine, line, free_ports(2), init=False)
    assert [code for code, _ in machines] == [1, 1]
    reports = [json.loads(said) for _, said in machines]
    assert reports[0] == reports[1]
    found = {name: reports[0][name] for name in ("ranks", "equal", "step", "again")}
    assert found == {"ranks": 2, "equal": [4], "step": 5, "again": "first"}
    assert content("runs/a") == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("replay_no_such_step", "--from 1"),
        ("replay_nothing_to_compare", "--from 4 --to 4"),
        ("replay_without_from", "--to 4"),
        ("replay_with_then", "--from 3 --then 1"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_anything_starts(
    name: str,
    options: str,
    train: Callable[..., None],
    snapshot: Callable[[str, str], Result],
) -> None:
    train(7)
    assert snapshot(name, f"run --replay runs/a {options} train.py 7 runs/a").exit_code in (1, 2)


def test_a_run_that_is_not_exact_is_refused(
    train: Callable[..., None], snapshot: Callable[[str, str], Result]
) -> None:
    train(2, exact=False)
    line = "run --replay runs/a --from 1 train.py 2 runs/a"
    assert snapshot("replay_not_exact", line).exit_code == 1
    assert snapshot("replay_no_run", line.replace("runs/a", "none")).exit_code == 1


def test_diff_names_the_first_step_of_two_exact_runs_that_differs(
    train: Callable[..., None],
    snapshot: Callable[[str, str], Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(6)
    monkeypatch.setenv("FAULT", "always")
    train(6, folder="runs/b")
    assert snapshot("diff_runs", "diff runs/a runs/b").exit_code == 1
    assert snapshot("diff_runs_equal", "diff runs/a runs/a").exit_code == 0


@pytest.mark.usefixtures("quick_start")
def test_a_script_that_opens_another_run_is_stopped(
    train: Callable[..., None], anyrank: Callable[[str], Result]
) -> None:
    train(2)
    result = anyrank("run --replay runs/a --from 1 train.py 2 runs/b")
    assert result.exit_code == 1
    assert "runs/b: the script opens this run in a replay of" in result.stderr
    assert not os.path.exists("runs/b")


@pytest.mark.usefixtures("quick_start")
def test_a_script_that_ends_too_early_is_an_error(
    train: Callable[..., None], anyrank: Callable[[str], Result]
) -> None:
    train(3)
    result = anyrank("run --replay runs/a --from 1 --json train.py 2 runs/a")
    assert result.exit_code == 1
    assert "the script ended before step 3, which the run has" in result.stderr
    assert Path("ended").exists()
    result = anyrank("run --replay runs/a --from 1 --json train.py 3 runs/a")
    assert (result.exit_code, json.loads(result.stdout)["equal"]) == (0, [2, 3])
