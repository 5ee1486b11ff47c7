"""Arguments of a run that differ between ranks: one error on all of them, and nothing is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks

SECONDS = 60.0  # far below any timeout, far above what an agreement takes when all is slow


def build() -> anyrank.TrainState:
    model = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(torch.zeros(8, 1), global_batch=4, microbatch=2)
    return anyrank.TrainState(model, torch.optim.SGD(model.parameters()), data=loader)


def message(call: Any) -> tuple[str, str, float]:
    """Class and text of what a call raises, and how long it took."""
    start = time.monotonic()
    with pytest.raises((anyrank.AnyrankError, ValueError, TypeError)) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def job_constructor(path: str, name: str, values: list[Any]) -> tuple[str, str, float]:
    options = {name: values[dist.get_rank()]}
    with anyrank.Checkpoints(path, build(), **options) as ckpts:
        return message(ckpts.resume)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("keep", [3, 4]),
        ("every", [2, "10min"]),
        ("background", [False, True]),
        ("verify", [True, False]),
        ("keep_every", [None, 5]),
    ],
)
def test_another_option_on_one_rank_is_named(tmp_path: Path, name: str, values: list[Any]) -> None:
    first, second = run_ranks(2, job_constructor, str(tmp_path), name, values)
    assert first[:2] == second[:2]
    kind, text, seconds = first
    assert kind == "CheckpointError"
    assert f"{name}= differs" in text
    assert all(f"{value!r} on rank {rank}" in text for rank, value in enumerate(values))
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == []


def job_state(path: str, name: str) -> tuple[str, str, float]:
    rank, model = dist.get_rank(), nn.Linear(1, 1)
    log = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    names = ["log"][:rank]
    options: dict[str, Any] = {
        "seed": {"seed": rank},
        "generators": {"generators": {name: torch.Generator() for name in names}},
        "first_rank": {"first_rank": names},
    }
    state = anyrank.TrainState(model, log=log, **options[name])
    with anyrank.Checkpoints(path, state) as ckpts:
        return message(ckpts.save)


@pytest.mark.parametrize("name", ["seed", "generators", "first_rank"])
def test_another_argument_of_the_state_on_one_rank_is_named(tmp_path: Path, name: str) -> None:
    first, second = run_ranks(2, job_state, str(tmp_path), name)
    assert first[:2] == second[:2]
    assert first[0] == "CheckpointError"
    assert f"TrainState(): {name}= differs between ranks" in first[1]
    assert list(tmp_path.iterdir()) == []


def job_options(path: str) -> tuple[str, str, float]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    with anyrank.Checkpoints(path, anyrank.TrainState(model, optimizer)) as ckpts:
        return message(ckpts.save)


def test_another_option_of_the_optimizer_on_one_rank_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_options, str(tmp_path))
    assert first[:2] == second[:2]
    assert "groups.0.options.lr: 0.1 and 0.2: make it alike on all ranks" in first[1]


def job_path(path: str) -> tuple[str, str, float]:
    with anyrank.Checkpoints(f"{path}/{dist.get_rank()}", build()) as ckpts:
        return message(ckpts.save)


def test_another_folder_on_one_rank_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_path, str(tmp_path))
    assert first[:2] == second[:2]
    assert "path= differs" in first[1]
    assert list(tmp_path.iterdir()) == []


CALLS = {
    "which": lambda ckpts, rank: ckpts.resume(("auto", "must")[rank]),
    "skip": lambda ckpts, rank: ckpts.resume(skip=("optimizer",)[:rank]),
    "until": lambda ckpts, rank: next(iter(ckpts.steps(until=3 + rank))),
    "epochs": lambda ckpts, rank: next(iter(ckpts.steps(epochs=3 + rank))),
    "wrong on one": lambda ckpts, rank: ckpts.resume(("auto", -5)[rank]),
}


def job_call(path: str, name: str) -> tuple[str, str, float]:
    with anyrank.Checkpoints(path, build()) as ckpts:
        return message(lambda: CALLS[name](ckpts, dist.get_rank()))


@pytest.mark.parametrize("name", CALLS)
def test_another_argument_of_a_call_is_named(tmp_path: Path, name: str) -> None:
    first, second = run_ranks(2, job_call, str(tmp_path), name)
    assert first[:2] == second[:2]
    kind, text, seconds = first
    assert kind == ("WrongValue" if name == "wrong on one" else "CheckpointError")
    assert ("not -5" if name == "wrong on one" else f"{name}= differs") in text
    assert seconds < SECONDS


def job_callback(path: str) -> list[int]:
    seen: list[int] = []
    first = dist.get_rank() == 0
    on_commit = (lambda record: seen.append(record.step)) if first else None
    with anyrank.Checkpoints(path, build(), on_commit=on_commit) as ckpts:
        ckpts.save()
    return seen


def test_on_commit_may_be_given_on_the_first_rank_alone(tmp_path: Path) -> None:
    assert run_ranks(2, job_callback, str(tmp_path)) == [[0], []]


def job_other_calls(path: str) -> tuple[str, str, float]:
    ckpts = anyrank.Checkpoints(path, build())
    try:
        return message(ckpts.step_done if dist.get_rank() else ckpts.save)
    finally:
        ckpts.close()


def test_other_calls_on_other_ranks_are_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_other_calls, str(tmp_path))
    assert first[:2] == second[:2]
    assert first[0] == "RankError"
    assert "Checkpoints.save() on rank 0" in first[1]
    assert "Checkpoints.step_done() on rank 1" in first[1]


def job_alone(path: str) -> tuple[str, str, float] | None:
    """`if rank == 0: ckpts.save()`, and the other rank goes on with something else."""
    told = Path(path, "told")
    with anyrank.Checkpoints(f"{path}/run", build()) as ckpts:
        ckpts.resume()
        if dist.get_rank() == 0:
            found = message(ckpts.save)
            told.touch()
            return found
        deadline = time.monotonic() + SECONDS
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return None


def test_a_save_on_one_rank_alone_names_the_others(tmp_path: Path) -> None:
    env = {"ANYRANK_TIMEOUT_SEC": "2"}
    found, _ = run_ranks(2, job_alone, str(tmp_path), env=env)
    assert found is not None
    kind, text, seconds = found
    assert kind == "RankError"
    assert text.startswith("rank 1 did not come to 'comparing the samples' within 2 s")
    assert seconds < SECONDS / 2
