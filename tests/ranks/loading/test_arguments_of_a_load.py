"""Wrong arguments of a load on one rank: the same error on all ranks, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks

WEIGHTS = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}


def job_one_wrong(options: dict[str, Any]) -> tuple[str, str]:
    given = {"source": WEIGHTS, **(options if dist.get_rank() == 1 else {})}
    try:
        anyrank.load(nn.Linear(3, 3), **given)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("WrongValue", {"missing": "erorr"}, "missing='erorr'"),
        ("WrongType", {"buffer_bytes": "1 MiB"}, "buffer_bytes='1 MiB'"),
        (
            "WrongType",
            {"source": 5},
            "source=: expected a path, a list of paths or a dict of tensors",
        ),
    ],
)
def test_one_ranks_wrong_argument_is_the_same_error_on_all(
    kind: str, options: dict[str, Any], text: str
) -> None:
    first, second = run_ranks(2, job_one_wrong, options)
    assert first == second
    assert first[0] == kind
    assert f"[rank 1] {text}" in first[1]


def job_used_late() -> list[tuple[bool, str, bool]]:
    """What arguments raise whose fault shows after the ranks have met; whether it is an error of
    the first kind, its text, and whether the model is as it was.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    found: list[tuple[bool, str, bool]] = []
    calls: list[tuple[type[Exception], Any]] = [
        (TypeError, lambda: anyrank.load(model, WEIGHTS, rename=Renamer(last))),
        (ValueError, lambda: anyrank.load(model, None)),
        (ValueError, lambda: anyrank.load(model, {})),
        (ValueError, lambda: anyrank.sync(None, None)),
        (TypeError, lambda: anyrank.sync(model, dict(WEIGHTS), layout=Layout(last))),
    ]
    for kind, call in calls:
        try:
            call()
        except Exception as error:
            found.append((isinstance(error, kind), str(error), torch.equal(model.weight, before)))
    return found


class Renamer:
    """A rename= that one rank forgets to return from."""

    def __init__(self, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def __call__(self, key: str) -> Any:
        return None if self.is_wrong else key

    def __repr__(self) -> str:
        return "Renamer"


class Layout(Renamer):
    """A layout= that one rank gives a wrong answer of."""

    def __call__(self, key: str) -> Any:
        return 3 if self.is_wrong else None


def test_a_fault_that_shows_late_is_the_same_error_on_all_ranks() -> None:
    results = run_ranks(2, job_used_late)
    assert results[0] == results[1]
    assert len(results[0]) == 5
    for is_kind, text, is_unchanged in results[0]:
        assert is_kind, text
        assert is_unchanged
    words = [
        "returned None",
        "on every rank",
        "is empty",
        "on every rank",
        "expected (mesh, placements)",
    ]
    assert all(word in text for word, (_, text, _) in zip(words, results[0], strict=True))
