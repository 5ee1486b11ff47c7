"""exact=True on a device: what it asks for, and the same bits in a second run."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from tests.ranks.exact_runs import sha256
from torch import nn

import anyrank

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which CUDA's products ask for
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(folder: Path, device: torch.device, until: int) -> str:
    """SHA-256 of a run after so many steps; it is resumed where it has some."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.3), nn.Linear(40, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    rows = torch.randn(24, 12, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=2, exact=True)
    state = anyrank.TrainState(net, optimizer, data=loader)
    with anyrank.Checkpoints(folder, state, every=1, keep=9) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(net):
                step.backward(net(batch.to(device)).square().mean())
            step.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert loader.notes == []
    return sha256(net, optimizer)


@pytest.mark.usefixtures("deterministic")
def test_a_second_run_on_the_device_has_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    first = train(tmp_path / "a", device, 4)
    train(tmp_path / "b", device, 1)
    assert train(tmp_path / "b", device, 4) == first
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert found, found
    assert found.steps_equal == [1, 2, 3, 4]
    assert anyrank.verify(tmp_path / "a")


def test_kernels_that_may_add_in_any_order_are_refused(
    device: torch.device, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"use_deterministic_algorithms\(True\)"):
        train(tmp_path, device, 1)
