"""`load` from a dict of sharded tensors: each rank gives what it has, and gets its share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks.loading.test_load_layouts import Halved
from tests.ranks.sharded_nets import LAYOUTS, Net, assert_same, reference
from tests.ranks.spies import warnings_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks


def job_live(src_layout: str, dst_layout: str, start: str) -> Any:
    source = LAYOUTS[src_layout](reference()).state_dict()
    torch.manual_seed(7)
    if start == "meta":
        with anyrank.meta():
            net: Any = LAYOUTS[dst_layout](Net())
    else:
        net = LAYOUTS[dst_layout](Net())
    report = anyrank.load(net, source, verify=True)
    assert_same(net, LAYOUTS[dst_layout](reference()))
    return report


@pytest.mark.parametrize("pair", [("fsdp", "tp"), ("tp", "plain"), ("hsdp", "fsdp")])
def test_a_sharded_state_dict_goes_into_any_layout(pair: tuple[str, str]) -> None:
    for start in ("real", "meta"):
        reports = run_ranks(4, job_live, *pair, start)
        assert all(report == reports[0] for report in reports)
        assert reports[0].strategy == "sync"
        assert reports[0].tied == {"embed.weight": ["head.weight"]}


def job_not_run() -> Any:
    source = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict()
    net = nn.Sequential(Halved(4, 4), nn.Linear(4, 4))
    with warnings_of("anyrank.load") as said:
        report = anyrank.load(net, {**source, "epoch": 3} if dist.get_rank() else source)
    return report.own_code_not_run, said


def test_a_modules_own_code_is_named_where_it_is_not_run() -> None:
    (first, said), (second, _) = run_ranks(2, job_not_run)
    assert first == second
    assert list(first) == ["0"]
    assert any("0" in text for text in said)


def job_array() -> str:
    source = dict(fully_shard(nn.Linear(4, 4)).state_dict())
    if dist.get_rank():
        source["bias"] = np.ones(4, np.float32)  # pyright: ignore[reportArgumentType]
    try:
        anyrank.load(nn.Linear(4, 4), source, missing="keep")
    except TypeError as error:
        return str(error)
    return ""


def test_an_array_among_sharded_tensors_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, job_array)
    assert "'bias' is of type ndarray" in first
    assert "'bias' is of type ndarray" in second
