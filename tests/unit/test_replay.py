"""A replay in one process: what it leaves, where it ends, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.files.manifest import read_manifest
from anyrank.files.receipt import in_short
from anyrank.files.storage import storage_for
from anyrank.resume.replay import ReplayRequest, read_trained, real_path, write_request
from anyrank.steps.step import Step


def own_loop(
    ckpts: anyrank.Checkpoints, loader: anyrank.ElasticLoader, steps: int
) -> Iterable[Step]:
    """The steps of a loop of one's own, which calls `step_done`."""
    while loader.step < steps:
        for step in loader:
            yield step
            ckpts.step_done()
            if loader.step >= steps:
                return


def steps(ckpts: anyrank.Checkpoints, loader: anyrank.ElasticLoader, steps: int) -> Iterable[Step]:
    del loader
    return ckpts.steps(until=steps)


def epochs(ckpts: anyrank.Checkpoints, loader: anyrank.ElasticLoader, steps: int) -> Iterable[Step]:
    del loader
    return ckpts.steps(epochs=-(-steps // 2))


LOOPS = {"steps": steps, "epochs": epochs, "own": own_loop}


def train(
    folder: Path,
    *,
    loop: Callable[..., Iterable[Step]] = steps,
    exact: bool = True,
    until: int = 6,
    resume: Callable[[anyrank.Checkpoints], object] = anyrank.Checkpoints.resume,
) -> list[str]:
    """Train a run, with a save at each step that is due; the committed steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.linspace(-1, 1, 32).view(8, 4)  # two steps in an epoch
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=2, exact=exact)
    state = anyrank.TrainState(model, optimizer, data=loader)
    said: list[str] = []
    with anyrank.Checkpoints(
        folder, state, every=2, keep=9, on_commit=lambda record: said.append(record.path)
    ) as ckpts:
        resume(ckpts)
        for step in loop(ckpts, loader, until):
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return said


def digests(run: Path) -> dict[int, str]:
    """Step -> digest of its receipt."""
    return {step: found["digest"] for step, found in receipts(run).items()}


def receipts(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> its receipt in short."""
    found = [read_manifest(storage_for(str(path)), str(path)) for path in run.glob("step-*")]
    return {manifest.step: in_short(manifest.receipt) for manifest in found}


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Trains `tmp_path / "run"`, and orders the replay of some of its steps."""

    def call(start: int, stop: int, changes: dict[int, str] | None = None) -> Path:
        train(tmp_path / "run")
        wanted = {s: r for s, r in receipts(tmp_path / "run").items() if start < s <= stop}
        for step, digest in (changes or {}).items():
            wanted[step] = {"digest": digest, "tensors": {}}
        results = tmp_path / "results"
        results.mkdir()
        write_request(ReplayRequest(real_path(str(tmp_path / "run")), start, wanted), str(results))
        monkeypatch.setenv("ANYRANK_REPLAY", str(results))
        return results

    return call


@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop_ends_with_the_last_step_of_the_request(
    loop: str, tmp_path: Path, replay: Callable[..., Path]
) -> None:
    results = replay(2, 6)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("run/**/*"))
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", loop=LOOPS[loop], until=10)
    assert ended.value.code == 0
    trained = read_trained(str(results))
    assert {one.step: one.receipt["digest"] for one in trained} == {
        step: digest for step, digest in digests(tmp_path / "run").items() if step > 2
    }
    assert [one.data["step"] for one in trained] == [4, 6]
    after = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("run/**/*"))
    assert after == before  # not even a lock


def test_a_replay_ends_at_the_first_step_that_differs(
    tmp_path: Path, replay: Callable[..., Path]
) -> None:
    results = replay(2, 6, {4: "0" * 32})
    with pytest.raises(SystemExit):
        train(tmp_path / "run")
    assert [one.step for one in read_trained(str(results))] == [4]


def test_a_script_that_ends_first_leaves_what_it_trained(
    tmp_path: Path, replay: Callable[..., Path]
) -> None:
    results = replay(2, 6)
    assert train(tmp_path / "run", until=5) == []  # nothing was saved
    assert [one.step for one in read_trained(str(results))] == [4]


def test_another_run_and_a_run_that_is_no_longer_exact_are_refused(
    tmp_path: Path, replay: Callable[..., Path]
) -> None:
    replay(2, 6)
    with pytest.raises(anyrank.CheckpointError, match="opens this run in a replay of"):
        train(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(anyrank.CheckpointError, match="the script trains without it now"):
        train(tmp_path / "run", exact=False)


def test_a_replay_resumes_all_parts_whatever_the_script_skips(
    tmp_path: Path, replay: Callable[..., Path]
) -> None:
    results = replay(2, 6)
    with pytest.raises(SystemExit):
        train(tmp_path / "run", resume=lambda ckpts: ckpts.resume("runs/a", skip=["optimizer"]))
    assert [one.step for one in read_trained(str(results))] == [4, 6]


def test_a_script_that_does_not_resume_proves_nothing_of_the_step(
    tmp_path: Path, replay: Callable[..., Path]
) -> None:
    results = replay(2, 6)
    with pytest.raises(anyrank.CheckpointError, match="came to step 4 without a resume"):
        train(tmp_path / "run", resume=lambda _: None)
    assert read_trained(str(results)) == []


def test_a_replay_leaves_the_snapshots_in_memory_alone(
    tmp_path: Path, replay: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(2, 6)
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("ANYRANK_PEERS_FOLDER", str(tmp_path / "memory"))
    with (
        anyrank.Checkpoints(
            tmp_path / "run", anyrank.TrainState(nn.Linear(1, 1)), peers=True
        ) as ckpts,
        pytest.raises(anyrank.CheckpointError),
    ):
        ckpts.resume()  # of another state, after the memory would have been opened
    assert not list((tmp_path / "memory").iterdir())
