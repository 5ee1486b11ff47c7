"""torchtitan's CheckpointManager in shape, with containers as its 0.3 source defines them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.integrations.torchtitan import CheckpointManager
from anyrank.testing import run_ranks


class OptimizersContainer(torch.optim.Optimizer):
    """A container that is an optimizer itself, as torchtitan's."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        super().__init__(params, {})

    def step(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for one in self.optimizers:
            one.step()


class Trainer:
    """What torchtitan saves as train_state."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        tokens = torch.tensor(self.ntokens_seen, dtype=torch.int64)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "ntokens_seen": tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"].item())
        self.ntokens_seen = int(state_dict["ntokens_seen"].item())


def setting(**more: Any) -> Any:
    config = {"enable": True, "folder": "checkpoint", "interval": 2, "keep_latest_k": 10}
    return SimpleNamespace(**(config | {"async_mode": "disabled"} | more))


def job(folder: str, steps: int, **more: Any) -> tuple[list[float], int, int]:
    """torchtitan's loop, in short. Returns losses, the step where it began, and tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4))
    data = torch.linspace(-1, 1, 92, dtype=torch.float64).view(23, 4)
    loader = anyrank.ElasticLoader(data, global_batch=8, microbatch=2)
    trainer = Trainer()
    manager = CheckpointManager(
        setting(**more),
        dataloader=loader,
        model_parts=[model],
        optimizers=OptimizersContainer([optimizer]),
        lr_schedulers=SimpleNamespace(schedulers=[schedule]),
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load(step=-1)
    start, losses = trainer.step, list[float]()
    while trainer.step < steps:
        for step in loader:
            trainer.step += 1
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            trainer.ntokens_seen += step.samples
            loader.commit()
            manager.save(trainer.step, last_step=trainer.step == steps)
            manager.maybe_wait_for_staging()
            if trainer.step == steps:
                break
    manager.maybe_wait_for_saving()
    manager.close()
    return losses, start, trainer.ntokens_seen


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_saved_on_3_resumed_on_2_then_on_4_as_on_one_rank(tmp_path: Path, mode: str) -> None:
    whole, _, tokens = run_ranks(1, job, str(tmp_path / "one"), 8, async_mode=mode)[0]
    losses: list[float] = []
    for ranks, stop in ((3, 3), (2, 5), (4, 8)):
        part, start, seen = run_ranks(ranks, job, str(tmp_path), stop, async_mode=mode)[0]
        assert start == len(losses)
        losses += part
    assert losses == pytest.approx(whole, rel=1e-9)
    assert seen == tokens == 23 + 23 + 16


def test_what_belongs_to_torchtitan_alone_is_refused(tmp_path: Path) -> None:
    model, none = nn.Linear(2, 2), SimpleNamespace(optimizers=[], schedulers=[])

    def make(parts: int = 1, **more: Any) -> CheckpointManager:
        return CheckpointManager(
            setting(**more),
            dataloader=None,
            model_parts=[model] * parts,
            optimizers=none,
            lr_schedulers=none,
            states={},
            base_folder=str(tmp_path),
        )

    with pytest.raises(ValueError, match="2 model parts: pipeline stages"):
        make(2)
    with pytest.raises(ValueError, match="initial_load_in_hf: the names"):
        make(initial_load_in_hf=True)
    off = make(enable=False)
    assert not off.load()
    assert not off.save(2, last_step=True)
    assert not make(load_only=True).save(2)
    manager = make()
    assert not manager.load()
    assert not manager.save(1)
    assert manager.save(2)
    model.weight.data.zero_()
    assert make().load()
    assert model.weight.abs().sum() > 0
    kept = model.weight.clone()
    model.weight.data.zero_()
    assert make(folder="new", initial_load_path=str(tmp_path / "checkpoint")).load()
    assert torch.equal(model.weight, kept)
