"""What the integrations share: versions that were tested, and a DataLoader as a loader of steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import anyrank
from anyrank.integrations.dataloaders import elastic_loader
from anyrank.versions import warn_if_untested


@pytest.mark.parametrize(
    ("oldest", "newest", "is_tested"),
    [("2.0", "99.0", True), ("2.0", "2.1", False), ("99.0", "99.1", False)],
)
def test_an_untested_version_gives_a_line_and_no_error(
    oldest: str, newest: str, is_tested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "anyrank"):
        warn_if_untested("torch", oldest, newest)
        warn_if_untested("torch", oldest, newest)
        warn_if_untested("no-such-package", oldest, newest)
    assert len(caplog.records) == (0 if is_tested else 1)


DATA: Any = torch.arange(10)


def steps_of(dataloader: Any, **options: Any) -> list[list[list[int]]]:
    """The samples of an epoch, by step and microbatch."""
    loader = elastic_loader(dataloader, global_batch=4, process_group=anyrank.ALONE, **options)
    model = torch.nn.Identity()
    return [[batch.tolist() for batch in step.microbatches(model)] for step in loader]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


def test_a_dataloader_keeps_its_order_and_its_end() -> None:
    assert steps_of(DataLoader(DATA, batch_size=2)) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9]],
    ]
    assert len(steps_of(DataLoader(DATA, batch_size=2, drop_last=True))) == 2
    assert steps_of(DataLoader(DATA, batch_size=2), microbatch=4)[0] == [[0, 1, 2, 3]]
    shuffled = flat(steps_of(DataLoader(DATA, batch_size=2, shuffle=True)))
    assert shuffled != sorted(shuffled) == list(range(10))
    weights = WeightedRandomSampler([0.0] * 9 + [1.0], 10)
    assert {*flat(steps_of(DataLoader(DATA, batch_size=2, sampler=weights)))} == {9}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataloader", "problem"),
    [
        (lambda: [1, 2], "the training data is a list"),
        (lambda: DataLoader(Stream(), batch_size=2), "a stream, whose order cannot be planned"),
        (lambda: DataLoader(DATA, batch_size=None), "has a batch_sampler, or no batching"),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, num_samples=4)),
            "sampler is a RandomSampler, whose order",
        ),
        (
            lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 3)),
            "as many draws as the dataset has samples",
        ),
    ],
)
def test_a_dataloader_that_cannot_be_kept_is_refused(dataloader: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        elastic_loader(dataloader(), global_batch=4)


@pytest.mark.parametrize("page", ["lightning", "transformers", "accelerate"])
def test_a_script_changes_in_at_most_three_lines(page: str) -> None:
    text = (Path(__file__).parents[2] / f"docs/integrations-{page}.md").read_text(encoding="utf-8")
    diff = text.split("```diff\n")[1].split("```")[0].splitlines()
    assert 1 <= sum(line.startswith("+") for line in diff) <= 3
