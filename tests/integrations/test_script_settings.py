"""Promise 8 in the frameworks: a learning rate that the script changes is named, or used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts import TORCHRUN
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from anyrank.testing import run_ranks

ROWS = torch.arange(48.0).reshape(12, 4)
Outcome = tuple[list[str], float]  # notes of the resume, the rate at the end


def under_trainer(folder: Path, rate: float, steps: int, options: dict[str, Any]) -> Outcome:
    import transformers
    from tests.integrations.test_trainer import arguments, model

    from anyrank.integrations.transformers import elastic

    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 12
    made = transformers.Trainer(
        model("plain", torch.float32),
        arguments(str(folder), learning_rate=rate, max_steps=steps, lr_scheduler_type="constant"),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
    )
    trainer: Any = elastic(made, folder / "run", global_batch=4, **options)
    trainer.train(resume_from_checkpoint=True)
    report = trainer.elastic.report
    schedule: Any = trainer.lr_scheduler
    return [] if report is None else report.notes, schedule.base_lrs[0]


def under_lightning(folder: Path, rate: float, steps: int, options: dict[str, Any]) -> Outcome:
    import lightning

    from anyrank.integrations.lightning import Elastic

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=rate)
            schedule = CosineAnnealingLR(optimizer, 8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callback = Elastic(folder / "run", global_batch=4, **options)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[callback],
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(ROWS), batch_size=2))
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    return [] if callback.report is None else callback.report.notes, schedule.base_lrs[0]


def under_accelerate(folder: Path, rate: float, steps: int, options: dict[str, Any]) -> Outcome:
    from tests.integrations.test_accelerate_elastic import fresh

    from anyrank.integrations.accelerate import Accelerator

    fresh()
    accelerator = Accelerator(cpu=True, folder=folder / "run", global_batch=4, **options)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = CosineAnnealingLR(optimizer, 8)
    loader = DataLoader(TensorDataset(ROWS), batch_size=2)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.load_state()
    run: Any = accelerator.run
    while run.step < steps:
        for (rows,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if run.step == steps:
                break
    report = accelerator.report
    accelerator.end_training()
    base: float = schedule.scheduler.base_lrs[0]
    accelerator.free_memory()
    return [] if report is None else report.notes, base


FRAMEWORKS = {"transformers": under_trainer, "lightning": under_lightning}
FRAMEWORKS["accelerate"] = under_accelerate


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_learning_rate_that_the_script_changes(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)

    def run(rate: float, steps: int, **options: Any) -> Outcome:
        train = FRAMEWORKS[framework]
        ranks = run_ranks(1, train, tmp_path, rate, steps, options, env=TORCHRUN)
        notes, base = ranks[0]
        return [note for note in notes if " in this script, " in note], base

    run(1e-3, 2)
    assert run(1e-3, 3) == ([], 1e-3)
    ours, theirs = "0.002 in this script, 0.001 in the saved run;", "the saved value is used"
    assert run(2e-3, 4) == ([f"optimizer lr: {ours} {theirs}"], 1e-3)
    used = [f"optimizer lr: {ours} this script's value is used"]
    assert run(2e-3, 5, settings="script") == (used, 2e-3)
    assert run(2e-3, 6) == ([], 2e-3)
