"""What docs/coming-from.md takes for granted: a model, its data, and the file of a DDP script."""

from __future__ import annotations

import torch
from torch import nn

data = torch.arange(384.0).reshape(96, 4) / 384


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def write_file(path: str) -> None:
    """Two epochs of four steps; epochs are counted from 0, and the schedule counts them."""
    model = nn.ModuleDict({"module": net()})  # the names that DDP gives
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in range(2):
        for batch in data.split(24):
            model["module"](batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
        file = {name: part.state_dict() for name, part in parts.items()}
        torch.save(file | {"epoch": epoch}, path)
