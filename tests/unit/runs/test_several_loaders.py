"""Promise 7, of every `ElasticLoader` of a state: each counts its steps as `data=` does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.errors import CheckpointError


def make(first: float, count: int = 48) -> anyrank.ElasticLoader:
    rows = torch.arange(first, first + count)[:, None]
    return anyrank.ElasticLoader(rows, global_batch=12, microbatch=2)


class Job:
    """A run with two loaders."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.web, self.books = make(0), make(1000, 120)
        self.state = anyrank.TrainState(self.model, self.optimizer, data=self.web, books=self.books)
        self.ckpts = anyrank.Checkpoints(folder, self.state, every=1)

    def train(self, step: Any, seen: Counter[float]) -> None:
        for batch in step.microbatches(self.model):
            seen.update(batch.flatten().tolist())
            step.backward(self.model(batch / 1000).square().mean())


def test_a_phase_on_a_second_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    seen = Counter[float]()
    for until in (6, 9, 12):
        job = Job(tmp_path)
        with job.ckpts as ckpts:
            ckpts.resume()
            while job.state.step < until:
                loader = job.web if job.state.step < 4 else job.books
                for step in loader:
                    job.train(step, seen)
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                    ckpts.step_done()
                    if job.state.step in (4, until):
                        break
        assert job.state.samples == job.web.samples + job.books.samples == 12 * until
    assert (job.web.step, job.books.step) == (4, 8)
    assert set(seen.values()) == {1}


def test_two_loaders_in_a_step_count_together(tmp_path: Path) -> None:
    seen = Counter[float]()
    for until in (2, 4):
        job = Job(tmp_path)
        with job.ckpts as ckpts:
            ckpts.resume()
            for one, other in zip(job.web, job.books, strict=False):
                job.train(one, seen)
                job.train(other, seen)
                job.optimizer.step()
                job.optimizer.zero_grad()
                ckpts.step_done()
                if job.state.step == until:
                    break
    assert (job.web.step, job.books.step) == (4, 4)
    assert set(seen.values()) == {1}


def test_a_step_with_an_unfinished_loader_neither_counts_nor_is_saved(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.ckpts as ckpts:
        step, other = next(web := iter(job.web)), next(books := iter(job.books))
        job.train(step, Counter())
        job.optimizer.step()
        job.optimizer.zero_grad()
        next(kept := other.microbatches(job.model))
        with pytest.raises(CheckpointError, match="save\\(\\) was called in the middle of a step"):
            ckpts.save()
        with pytest.raises(CheckpointError, match="step 0 is not complete"):
            ckpts.step_done()
        del web, books, kept
