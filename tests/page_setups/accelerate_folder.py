"""What docs/coming-from.md takes for granted: a model, and a folder that Accelerate wrote."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def write_folder(path: str) -> None:
    """Three steps, saved by Accelerate's `save_state`."""
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(path)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
