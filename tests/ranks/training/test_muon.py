"""Muon for matrices with AdamW beside it: a run that goes from 4 ranks to 3 and to 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

BATCH, STEPS = 12, 2
Found = dict[str, torch.Tensor]


def whole(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def job_train(path: str, kind: str, until: int) -> tuple[dict[str, str], Found, Found]:
    """The resume's outcomes; all weights and state after it, and after the steps until `until`."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))
    if dist.is_initialized() and dist.get_world_size() > 1:
        net = DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)
    named = {name.removeprefix("module."): param for name, param in net.named_parameters()}
    matrices = [param for param in named.values() if param.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adam = torch.optim.AdamW([param for param in named.values() if param.ndim == 1], lr=0.01)
    rows = torch.randn(6 * BATCH, 6, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=BATCH, microbatch=1)
    state = anyrank.TrainState(net, muon, data=loader, adam=adam)

    def now() -> Found:
        found = {name: whole(param) for name, param in named.items()}
        for optimizer in (muon, adam):
            for name, param in named.items():
                if param in optimizer.state:
                    found |= {f"{name}.{k}": whole(v) for k, v in optimizer.state[param].items()}
        return found

    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        before = now()
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(net):
                step.backward((net(batch) - batch[:, :5]).square().mean())
            muon.step()
            adam.step()
            net.zero_grad()
        outcomes = {} if report is None else {k: str(v) for k, v in report.components.items()}
        return outcomes, before, now()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_muon_beside_adamw_goes_on_on_other_ranks(kind: str, tmp_path: Path) -> None:
    last: Found = {}
    for number, size in enumerate((4, 3, 1), 1):
        results = run_ranks(size, job_train, str(tmp_path / "run"), kind, number * STEPS)
        outcomes, before, after = results[0]
        for _, other, other_after in results[1:]:
            assert all(torch.equal(before[name], other[name]) for name in before)
            assert all(torch.equal(after[name], other_after[name]) for name in after)
        if last:
            assert {outcomes[part] for part in ("model", "optimizer", "adam")} == {"resharded"}
            assert before.keys() == last.keys()
            assert all(torch.equal(before[name], last[name]) for name in last), "the saved bits"
        last = after
    assert "0.weight.momentum_buffer" in last
    assert "0.bias.exp_avg" in last
    alone = run_ranks(1, job_train, str(tmp_path / "alone"), "ddp", 3 * STEPS)[0][2]
    for name, tensor in last.items():
        # Muon computes in bfloat16, where other orders of a sum may differ by an ulp.
        torch.testing.assert_close(tensor, alone[name], rtol=2e-2, atol=2e-3)
