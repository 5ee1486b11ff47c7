"""Gradients that are changed between the exact sum and the optimizer's step are noted, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.spies import warnings_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.exact.run import WARNING

Change = Callable[[Any, Any], object]


def scaled(net: Any, factor: float) -> None:
    for parameter in net.parameters():
        parameter.grad.mul_(factor)


CHANGES: dict[str, Change] = {
    "nothing": lambda step, net: None,
    "own clipping": lambda step, net: step.clip_grad_norm_(1e-3),
    "torch's clipping": lambda step, net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    "torch's clipping of small gradients": lambda step, net: nn.utils.clip_grad_norm_(
        net.parameters(), 1e6
    ),
    "both": lambda step, net: (
        step.clip_grad_norm_(1e-3),
        nn.utils.clip_grad_norm_(net.parameters(), 1e-4),
    ),
    "torch's, then own": lambda step, net: (
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
        step.clip_grad_norm_(1e-4),
    ),
    "own twice, unscaled": lambda step, net: (
        step.clip_grad_norm_(1e-3),
        scaled(net, 2.0**-16),
        step.clip_grad_norm_(1e-9),
    ),
    "unscaled": lambda step, net: scaled(net, 2.0**-16),
    "a constant": lambda step, net: scaled(net, 0.1),
    "replaced": lambda step, net: setattr(net[1].bias, "grad", net[1].bias.grad * 3),
}


def job_changed() -> dict[str, int]:
    found: dict[str, int] = {}
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = anyrank.ElasticLoader(torch.randn(24, 4), global_batch=8, microbatch=2, exact=True)
        with warnings_of("anyrank.exact") as told:
            for step in loader:
                for batch in step.microbatches(net):
                    step.backward(net(batch).square().mean())
                change(step, net)
                optimizer.step()
                optimizer.zero_grad()
        found[name] = loader.notes.count(WARNING)
        assert found[name] == told.count(WARNING)
    return found


@pytest.mark.exact_fsdp
def test_changed_gradients_are_noted_once() -> None:
    warned = {"torch's clipping", "both", "torch's, then own", "a constant", "replaced"}
    for found in run_ranks(2, job_changed, timeout=100):
        assert found == {name: int(name in warned) for name in CHANGES}
