"""A torch whose FSDP2 is built otherwise is refused by name, before a step begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from anyrank.training.gradients import fsdp2 as fsdp_groups


def record(**changes: Any) -> SimpleNamespace:
    """What FSDP2 keeps of a parameter, as far as anyrank reads it."""
    known = {
        "mp_policy": MixedPrecisionPolicy(),
        "sharded_param": nn.Parameter(torch.zeros(2)),
        "unsharded_accumulated_grad": None,
    }
    return SimpleNamespace(**(known | changes))


@pytest.fixture(autouse=True)
def unused_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 can reduce unused parameters, as from torch 2.13 on."""
    monkeypatch.setattr(FSDPModule, "set_reduce_scatter_unused_params", None, raising=False)


def module(lacks: str = "", of_record: str = "") -> SimpleNamespace:
    """An FSDP2 module whose group, or the record of whose parameter, lacks a name."""
    parameter = record()
    if of_record:
        delattr(parameter, of_record)
    names = {name: None for name in (*fsdp_groups.GROUP_NAMES, "mesh_info") if name != lacks}
    names |= {} if lacks == "fsdp_params" else {"fsdp_params": [parameter]}
    state = SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(**names)])
    return SimpleNamespace(_get_fsdp_state=lambda: state)


@pytest.mark.parametrize("name", [*fsdp_groups.GROUP_NAMES, "mesh_info", "fsdp_params"])
def test_a_group_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"torch {torch.__version__[:4]}.* has no .*{name}"):
        fsdp_groups.check_names([module(lacks=name)], is_exact=True)


@pytest.mark.parametrize("name", fsdp_groups.PARAMETER_NAMES)
def test_a_record_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"has no SimpleNamespace\.{name}, .*README"):
        fsdp_groups.check_names([module(of_record=name)], is_exact=False)


def test_what_only_exact_reads_may_be_missing_without_it() -> None:
    for name in fsdp_groups.GROUP_NAMES:
        fsdp_groups.check_names([module(lacks=name)], is_exact=False)
    fsdp_groups.check_names([module()], is_exact=True)


def test_exact_is_refused_on_a_torch_that_leaves_out_unused_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.13 or newer.*exact=False"):
        fsdp_groups.check_names([module()], is_exact=True)
    fsdp_groups.check_names([module()], is_exact=False)
    fsdp_groups.check_names([], is_exact=True)  # without FSDP2 it works


def test_a_state_without_groups_is_refused() -> None:
    unknown = SimpleNamespace(_get_fsdp_state=SimpleNamespace)
    with pytest.raises(RuntimeError, match=r"has no FSDPState\._fsdp_param_groups"):
        fsdp_groups.parameter_groups(unknown)
