"""The rules of `check`, each on facts made by hand: what they say, and when they are silent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.facts import Facts, Known
from anyrank.watching.rules import run_rules
from anyrank.watching.slow import find_model
from anyrank.world.first_ranks import FirstRanks

LOADER = LoaderFacts(4, (2, 0), 0, 64, "", 0)


def facts(**changes: Any) -> Facts:
    """Those of a rank on which all is well."""
    changes.setdefault("seed", changes.pop("number", 0))
    well = Facts(1, 0, False, "", None, ())
    return dataclasses.replace(well, **changes)


def known(*every: Facts, differing: Any = None, batch: int | None = None) -> Known:
    return Known(tuple(range(len(every))), every, differing or {}, batch, 1)


def loader(rank: int, **changes: Any) -> LoaderFacts:
    return dataclasses.replace(LOADER, **{"share": (2, rank), **changes})


def said(*every: Facts, **options: Any) -> list[tuple[str, str]]:
    return [(finding.rule, finding.where) for finding in run_rules(known(*every, **options))]


def test_lines_that_a_rank_lacks_are_no_other_values() -> None:
    lacking = {"values whole": {"w": {"a": FirstRanks((0,), 1), None: FirstRanks((1,), 1)}}}
    assert said(facts(), facts(number=1), differing=lacking) == []


def test_frozen_parts_are_told_from_trained_ones() -> None:
    values = {"a": FirstRanks((0,), 1), "b": FirstRanks((1,), 1)}
    differing = {"values whole": {"w": values}, "values frozen whole": {"vae.w": values}}
    trained, frozen = run_rules(known(facts(), facts(number=1), differing=differing))
    assert (trained.where[:2], frozen.where[:6]) == ("w;", "vae.w;")
    assert "they are not broadcast" in frozen.fix


@pytest.mark.parametrize(("batch", "fix"), [(16, "batch_size=8"), (15, "a multiple of 2")])
def test_the_batch_that_fits_is_told(batch: int, fix: str) -> None:
    every = [facts(number=rank, loader=loader(rank)) for rank in (0, 1)]
    assert said(*every, batch=8) == []
    (finding,) = run_rules(known(*every, batch=batch))
    assert fix in finding.fix


def test_several_optimizers_are_taken_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    several = [torch.optim.SGD(layer.parameters()) for layer in model]
    assert anyrank.check(model, several) == []
    assert [found.where for found in anyrank.check(model, several[:1])] == [
        "1.weight, 1.bias, rank 0"
    ]


def test_the_model_is_the_outermost_module_with_the_optimizers_parameters() -> None:
    inner, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(outer.parameters())
    assert find_model([loss, other, outer, inner], [optimizer]) is outer
    assert find_model([inner, loss], [optimizer]) is inner
    assert find_model([loss, other], [optimizer]) is None
    other(torch.zeros(1, 2)).sum().backward()
    assert find_model([loss, other], [optimizer]) is other  # the optimizer is stale
