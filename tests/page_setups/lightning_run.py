"""What docs/frameworks.md takes for granted: a module, its data, a quiet trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


data = DataLoader(torch.linspace(0, 1, 96).view(24, 4), batch_size=2, shuffle=True)  # type: ignore[arg-type]
off: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
off |= {"enable_checkpointing": False, "enable_model_summary": False, "devices": 1}


def be_quiet() -> None:
    """Leave out what Lightning says of the machine."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
