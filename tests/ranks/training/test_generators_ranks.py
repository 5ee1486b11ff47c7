"""Random generators of a run on another number of ranks: what the report says of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def job_save(path: str, used: str) -> None:
    torch.manual_seed(0)
    random.seed(dist.get_rank())  # as of processes that nobody seeds
    np.random.seed(dist.get_rank())
    state = anyrank.TrainState(nn.Linear(1, 1))
    if used == "drawn":
        random.random()
    if used == "seeded":
        np.random.seed(10 + dist.get_rank())
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.save()


def job_resume(path: str) -> tuple[str, str, list[str]]:
    with anyrank.Checkpoints(path, anyrank.TrainState(nn.Linear(1, 1))) as ckpts:
        report = ckpts.resume("must")
    assert report is not None
    outcome = report.components["random"]
    return outcome, outcome.reason, [note for note in report.notes if "random generator" in note]


@pytest.mark.parametrize(("used", "name"), [("", ""), ("drawn", "python"), ("seeded", "numpy")])
def test_derived_streams_are_told_of_where_somebody_used_them(
    used: str, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    run_ranks(2, job_save, path, used)
    for outcome, reason, notes in run_ranks(3, job_resume, path):
        assert outcome == ("derived" if name else "exact")
        anew = (
            "random numbers drawn outside the loop are reseeded, because the rank count changed "
            "from 2 to 3"
        )
        assert reason == (anew if name else "")
        assert [note.split(":")[0] for note in notes] == [f"random generator {name}"] * bool(name)


def job_train(path: str, until: int, draws: bool) -> tuple[dict[str, str], list[str], int]:
    """README's script, seeded; its loop draws from its own streams alone, or from torch's."""
    torch.manual_seed(0)
    state_before = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(24, 4), global_batch=12, microbatch=2)
    state = anyrank.TrainState(wrapped, optimizer, data=loader)
    torch.rand(1)  # a part of the set-up
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(wrapped):
                step.backward(wrapped(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if draws:
                torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), state_before)
    components = {} if report is None else report.components
    reason = components["random"].reason if components else ""
    return dict(components), [reason], state.step


@pytest.mark.parametrize("ranks", [(1, 2, 3), (2, 1, 3)])
def test_streams_that_the_loop_has_not_drawn_from_are_no_news(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    for number, count in enumerate(ranks):
        answers = run_ranks(count, job_train, path, number + 1, False)
        if number:
            assert {components["random"] for components, _, _ in answers} == {"exact"}


def test_streams_that_the_loop_draws_from_begin_anew_on_other_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run_ranks(1, job_train, path, 1, True)
    for components, (reason,), _ in run_ranks(2, job_train, path, 2, True):
        assert components["random"] == "derived"
        assert reason == (
            "random numbers drawn outside the loop are reseeded, because the rank count changed "
            "from 1 to 2; data order, augmentation and dropout are not affected"
        )
