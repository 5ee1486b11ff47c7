"""Runs of Lightning go on as runs of anyrank; the `.ckpt` files are written by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import tools
from torch import nn

from anyrank.testing import run_ranks

lightning = pytest.importorskip("lightning.pytorch")


class Module(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = tools.seeded(seed)
        self.losses: list[float] = []
        self.save_hyperparameters({"folder": Path("runs")})

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = tools.optimizer_of(self.net)
        return [optimizer], [{"scheduler": tools.cosine(optimizer), "interval": "step"}]


def fit(seed: int, steps: int, resume: str | None = None) -> tuple[Any, Any]:
    off = ["enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, **dict.fromkeys(off, False)
    )
    # A loader without a state of its own begins anew when Lightning resumes.
    first = tools.SAVED if resume else 0
    rows = [tools.batch((first + n) % tools.STEPS) for n in range(tools.STEPS)]
    module = Module(seed)
    loader = torch.utils.data.DataLoader(rows, batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return trainer, module


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    source = str(tmp_path / "last.ckpt")
    trainer, _ = fit(0, tools.SAVED)
    trainer.save_checkpoint(source)
    _, module = fit(1, tools.STEPS, source)
    expected = module.losses
    assert len(expected) == 3
    options = {"rename": {"net": ""}}
    for world, layout in ((1, "ddp"), (3, "fsdp")):
        folder = str(tmp_path / f"run-{world}-{layout}")
        for losses, report, steps in run_ranks(
            world, tools.job_adopt, source, folder, layout, **options
        ):
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
            assert (report.step, steps) == (3, [6, 4])
            assert report.components["scheduler"] == "exact"
            assert "Lightning" in str(report)
