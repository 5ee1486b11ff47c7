"""Runs of Lightning go on as runs of anyrank; the `.ckpt` files are written by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import tools
from torch import nn

import anyrank
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


class Averaged(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def averages(kind: str) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

    return EMAWeightAveraging(decay=0.5) if kind == "ema" else WeightAveraging()


def fit_averaged(steps: int, callbacks: list[Any]) -> Any:
    off = ["enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        **dict.fromkeys(off, False),
    )
    rows = torch.utils.data.TensorDataset(torch.eye(4).repeat(8, 1))
    torch.manual_seed(0)
    trainer.fit(Averaged(), torch.utils.data.DataLoader(rows, batch_size=4))
    return trainer


class SaveAt(lightning.Callback):
    """Saves a checkpoint after a step, as ModelCheckpoint does: with the average in its place."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_the_weights_beside_lightnings_average_go_on(kind: str, tmp_path: Path) -> None:
    from anyrank.integrations.lightning import Elastic

    source = str(tmp_path / "last.ckpt")
    fit_averaged(5, [averages(kind), SaveAt(source, 4)])
    saved = torch.load(source, weights_only=False)
    raw, average = saved["current_model_state"], saved["state_dict"]
    assert not torch.equal(raw["net.weight"], average["net.weight"])

    module, copy = Averaged(), Averaged()  # a loop of one's own
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = anyrank.TrainState(module, optimizer, ema=copy)
    with anyrank.Checkpoints(tmp_path / "own", state) as ckpts:
        report = ckpts.resume(source)
    assert report is not None
    assert report.components["model"] == report.components["ema"] == "exact"
    assert torch.equal(module.net.weight, raw["net.weight"])
    assert torch.equal(copy.net.weight, average["net.weight"])

    callback = averages(kind)  # the callback's own average, at the step that is resumed
    begun: list[Any] = []

    class Look(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            inner = callback._average_model
            begun.append((pl_module.net.weight.clone(), inner.module.net.weight.clone()))
            begun.append(int(inner.n_averaged))

    elastic = Elastic(tmp_path / "run", global_batch=4, resume=source)
    fit_averaged(6, [callback, elastic, Look()])
    (model, inner), count = begun
    assert torch.equal(model, raw["net.weight"])
    assert torch.equal(inner, average["net.weight"])
    assert count == int(saved["averaging_state"]["n_averaged"]) > 0

    exported = anyrank.convert(source, tmp_path / "out")  # weights alone: the average
    plain = Averaged()
    anyrank.load(plain, exported.path)
    assert torch.equal(plain.net.weight, average["net.weight"])
