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


def build(rate: float = 0.1, **options: Any) -> anyrank.TrainState:
    model = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(torch.zeros(8, 1), global_batch=4, microbatch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    log = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    return anyrank.TrainState(model, optimizer, data=loader, log=log, **options)


def message(call: Any) -> tuple[str, str, float]:
    """Class and text of what a call raises, and how long it took."""
    start = time.monotonic()
    with pytest.raises((anyrank.AnyrankError, ValueError, TypeError)) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


OPTIONS: dict[str, tuple[Any, Any]] = {  # of Checkpoints, on either rank
    "keep": (3, 4),
    "every": (2, "10min"),
    "background": (False, True),
    "verify": (True, False),
    "keep_every": (None, 5),
}
STATES: dict[str, tuple[Any, Any]] = {  # of TrainState
    "seed": (0, 1),
    "generators": ({}, {"log": torch.Generator()}),
    "first_rank": ([], ["log"]),
}
CALLS: dict[str, Any] = {
    "which": lambda ckpts, rank: ckpts.resume(("auto", "must")[rank]),
    "skip": lambda ckpts, rank: ckpts.resume(skip=("optimizer",)[:rank]),
    "until": lambda ckpts, rank: next(iter(ckpts.steps(until=3 + rank))),
    "epochs": lambda ckpts, rank: next(iter(ckpts.steps(epochs=3 + rank))),
    "wrong on one": lambda ckpts, rank: ckpts.resume(("auto", -5)[rank]),
    "another folder": lambda ckpts, rank: ckpts.save(),
    "another run": lambda ckpts, rank: ckpts.save(),
    "another rate": lambda ckpts, rank: ckpts.save(),
}
WORDS = {
    **{name: f"{name}= differs between ranks: " for name in (*OPTIONS, *CALLS)},
    **{name: f"TrainState(): {name}= differs between ranks" for name in STATES},
    "wrong on one": "[rank 1] which=-5: must be 'auto', 'must', a step number or a path",
    "another folder": "path= differs",
    "another run": "the ranks hold states of different runs: run-0 on rank 0, run-1 on rank 1. ",
    "another rate": "groups.0.options.lr: 0.1 and 0.2",
}


def job_differs(path: str, name: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    own = {key: values[rank] for key, values in STATES.items() if key == name}
    state = build(rate=0.1 * (1 + rank) if name == "another rate" else 0.1, **own)
    state.run = f"run-{rank}" if name == "another run" else None
    options = {key: values[rank] for key, values in OPTIONS.items() if key == name}
    folder = f"{path}/{rank}" if name == "another folder" else path
    with anyrank.Checkpoints(folder, state, **options) as ckpts:
        return message(lambda: CALLS.get(name, lambda ckpts, _: ckpts.resume())(ckpts, rank))


@pytest.mark.parametrize("name", WORDS)
def test_what_is_another_on_one_rank_is_named_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    first, second = run_ranks(2, job_differs, str(tmp_path), name)
    assert first[:2] == second[:2]
    kind, text, seconds = first
    assert kind == ("WrongValue" if name == "wrong on one" else "CheckpointError")
    assert WORDS[name] in text
    for rank, value in enumerate(OPTIONS.get(name, ())):
        assert f"{value!r} on rank {rank}" in text
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == [] or name in ("until", "epochs", "another rate")


def job_orders(path: str) -> bool:
    names = ["data", "log", "optimizer"]
    in_order = dict.fromkeys(reversed(names) if dist.get_rank() else names)
    with anyrank.Checkpoints(path, build()) as ckpts:
        ckpts.save()
        return ckpts.resume(skip=in_order.keys(), fresh=in_order.keys()) is not None


def test_names_in_another_order_are_the_same(tmp_path: Path) -> None:
    """Sets have one on each rank, by their process's hash seed."""
    assert run_ranks(2, job_orders, str(tmp_path)) == [True, True]


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
    assert text.startswith("rank 1 did not reach 'comparing the samples' within 2 s")
    assert seconds < SECONDS / 2
