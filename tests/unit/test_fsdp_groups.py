"""FSDP2 of one torch and another: where sums lie, and to what gradients are rounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from anyrank.exact import fsdp as exact_fsdp
from anyrank.steps import fsdp_groups


def record(**changes: Any) -> SimpleNamespace:
    """What FSDP2 keeps of a parameter, as far as anyrank reads it."""
    known = {
        "mp_policy": MixedPrecisionPolicy(),
        "sharded_param": nn.Parameter(torch.zeros(2)),
        "unsharded_accumulated_grad": None,
    }
    return SimpleNamespace(**(known | changes))


class Later(SimpleNamespace):
    """A record of torch 2.15, whose dtype of gradients is known after the first forward alone."""

    @property
    def unsharded_grad_dtype(self) -> torch.dtype:
        raise AttributeError


def test_what_was_added_up_is_dropped_where_each_torch_keeps_it() -> None:
    whole = nn.Parameter(torch.zeros(2))
    whole.grad = torch.ones(2)
    before = record(unsharded_param=whole, unsharded_accumulated_grad=torch.ones(2))
    group = SimpleNamespace(fsdp_params=[before, record()])  # the second was never gathered
    state = SimpleNamespace(_fsdp_param_groups=[group])
    fsdp_groups.drop_accumulated(SimpleNamespace(_get_fsdp_state=lambda: state))
    assert whole.grad is None
    assert before.unsharded_accumulated_grad is None


def test_gradients_are_rounded_as_each_torch_says() -> None:
    bf16 = torch.bfloat16
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=bf16),
        MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32),
    ]
    until_2_14 = [exact_fsdp.reduction_dtype(record(mp_policy=p)) for p in policies]
    since_2_15 = [exact_fsdp.reduction_dtype(Later(mp_policy=p)) for p in policies]
    assert until_2_14 == [None, bf16, torch.float32]
    assert since_2_15 == [None, None, torch.float32]
