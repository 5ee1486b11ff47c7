"""Saves and resumes of state on a device: where optimizer state is, pinned staging, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume, save
from torch import nn

import anyrank

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def build(options: dict[str, Any], device: torch.device) -> anyrank.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    return anyrank.TrainState(model, optimizer, scaler=torch.amp.GradScaler(device.type))


def train(state: anyrank.TrainState, steps: int) -> list[float]:
    """Losses, which dropout on the device makes depend on its stream."""
    model, optimizer = state.parts.by_name["model"], state.parts.by_name["optimizer"]
    device = next(model.parameters()).device
    losses: list[float] = []
    for _ in range(steps):
        loss = model(torch.ones(4, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_on_the_device_goes_on_bit_by_bit(
    device: torch.device, tmp_path: Path, name: str, background: bool
) -> None:
    state = build(OPTIONS[name], device)
    train(state, 3)
    with anyrank.Checkpoints(tmp_path, state, background=background) as ckpts:
        ckpts.step_done()
        ckpts.save()
        expected = train(state, 3)  # while it is copied, in the background
        ckpts.wait()
    fresh = build(OPTIONS[name], device)
    report = resume(tmp_path, fresh, "must")
    assert report is not None
    assert set(report.components.values()) == {"exact"}
    for mine, other in zip(
        fresh.parts.by_name["optimizer"].state.values(),
        state.parts.by_name["optimizer"].state.values(),
        strict=True,
    ):
        assert {k: v.device for k, v in mine.items()} == {k: v.device for k, v in other.items()}
    assert train(fresh, 3) == expected


def test_a_run_moves_from_the_device_to_the_cpu_and_back(
    device: torch.device, tmp_path: Path
) -> None:
    state = build({}, device)
    train(state, 2)
    save(tmp_path / "device", state)
    moved = build({}, torch.device("cpu"))
    report = resume(tmp_path / "device", moved, "must")
    assert report is not None
    assert report.components["random"] in ("exact", "derived")
    for parameter, other in zip(
        moved.parts.by_name["model"].parameters(),
        state.parts.by_name["model"].parameters(),
        strict=True,
    ):
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, other.cpu())
    save(tmp_path / "cpu", moved)
    back = build({"fused": True}, device)
    resume(tmp_path / "cpu", back, "must")
    steps = [one["step"] for one in back.parts.by_name["optimizer"].state.values()]
    assert all(
        step.device == device and step.item() == 2 for step in steps
    )  # a fused step reads it there


def test_staging_is_pinned_and_reused(device: torch.device, tmp_path: Path) -> None:
    state = build({}, device)
    train(state, 1)
    with anyrank.Checkpoints(tmp_path, state, every=1, background=True) as ckpts:
        addresses: set[int] = set()
        for _ in range(3):
            ckpts.step_done()
            ckpts.wait()
            background = ckpts._background
            assert background is not None
            assert background._staging._memory.is_pinned()
            addresses.add(background._staging._memory.data_ptr())
    assert len(addresses) == 1
