"""What docs/leave.md says of runs under a framework: the framework alone continues with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from tests.page_setups import lightning_run, trainer_run
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader

from anyrank.integrations.accelerate import Accelerator
from anyrank.integrations.lightning import Elastic
from anyrank.integrations.transformers import elastic

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def fill(model: Any, optimizer: Any, step: Path) -> None:
    """As the page does, with torch alone."""
    groups_there = json.loads((step / "anyrank.json").read_text())["parts"]["optimizer"]["groups"]
    saved: dict[str, Any] = {"model": model.state_dict()}
    saved["optimizer"] = get_optimizer_state_dict(model, optimizer)
    groups = saved["optimizer"].pop("param_groups")
    dcp.load(saved, checkpoint_id=step)
    model.load_state_dict(saved["model"])
    for mine, theirs in zip(groups, groups_there, strict=True):
        assert mine["params"] == theirs["params"]
        mine["lr"] = theirs["options"]["lr"]
    set_optimizer_state_dict(model, optimizer, {**saved["optimizer"], "param_groups": groups})


def assert_same_weights(model: Any, trained: Any) -> None:
    expected = trained.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_the_trainer_continues_with_weights_and_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = elastic(trainer_run.make(2), "run", global_batch=8)
    before.train(resume_from_checkpoint=True)
    made = trainer_run.make(4)
    model: Any = made.model
    decayed = made.get_decay_parameter_names(model)
    parts = [(n in decayed, parameter) for n, parameter in model.named_parameters()]
    groups = [[p for is_decayed, p in parts if is_decayed is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    fill(model, optimizer, tmp_path / "run/step-00000002")
    assert_same_weights(model, before.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    after = transformers.Trainer(
        model, made.args, train_dataset=made.train_dataset, optimizers=(optimizer, schedule)
    )
    after.remove_callback(transformers.PrinterCallback)
    after.train()
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def test_lightning_continues_from_its_own_checkpoint_or_from_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lightning_run.be_quiet()
    module, other = lightning_run.Module(), lightning_run.Module()
    best = lightning.pytorch.callbacks.ModelCheckpoint("own", filename="best")
    callbacks: Any = [Elastic("run", global_batch=8), best]
    options = lightning_run.off | {"enable_checkpointing": True}
    before = lightning.Trainer(max_epochs=1, callbacks=callbacks, **options)
    before.fit(module, lightning_run.data)
    before.save_checkpoint("last.ckpt")
    fill(other, other.configure_optimizers(), tmp_path / "run/step-00000003")
    assert_same_weights(other, module)
    for path in ("last.ckpt", "own/best.ckpt"):
        after = lightning.Trainer(max_epochs=2, **lightning_run.off)
        after.fit(lightning_run.Module(), lightning_run.data, ckpt_path=path)
        assert (before.global_step, after.global_step) == (3, 3 + len(lightning_run.data))


def test_accelerate_continues_with_weights_and_moments(tmp_path: Path) -> None:
    ours: Any = Accelerator(cpu=True, folder=tmp_path / "run", global_batch=8)
    model: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(torch.randn(32, 4), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = ours.prepare(model, optimizer, loader)
    ours.load_state()
    for batch in loader:
        ours.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    ours.end_training()
    other: Any = torch.nn.Linear(4, 1)
    plain = torch.optim.AdamW(other.parameters())
    fill(other, plain, tmp_path / "run/step-00000004")
    prepared: Any = accelerate.Accelerator(cpu=True).prepare(other, plain)
    assert_same_weights(prepared[0], model)
    assert prepared[1].param_groups[0]["lr"] == 0.01
    assert {int(state["step"]) for state in plain.state.values()} == {4}
