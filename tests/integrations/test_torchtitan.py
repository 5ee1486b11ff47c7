"""anyrank's CheckpointManager in torchtitan's place, with torchtitan's own containers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations import test_from_dcp, tools
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.integrations.torchtitan import CheckpointManager
from anyrank.testing import Fault, RanksFailed, run_ranks

titan: Any = pytest.importorskip(
    "torchtitan.components.checkpoint", reason="another torch", exc_type=ImportError
)


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


def containers(model: nn.Module) -> tuple[Any, Any]:
    """Optimizers and schedulers as torchtitan holds them."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "eps": 1e-6}
    )
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[model])
    return optimizers, LRSchedulersContainer(optimizers, warm_up)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def setting(**more: Any) -> Any:
    """torchtitan's configuration."""
    return titan.CheckpointManager.Config(**({"enable": True, "interval": 2} | more))


def job(folder: str, steps: int, **more: Any) -> tuple[list[float], int, int]:
    """torchtitan's loop, in short. Returns losses, the step where it began, and tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()
    fully_shard(model)
    optimizers, schedulers = containers(model)
    data = torch.linspace(-1, 1, 92, dtype=torch.float64).view(23, 4)
    loader = anyrank.ElasticLoader(data, global_batch=8, microbatch=2)
    trainer = Trainer()
    manager = CheckpointManager(
        setting(**more),
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
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
            optimizers.step()
            optimizers.zero_grad()
            schedulers.step()
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


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_step_before(tmp_path: Path) -> None:
    whole, _, tokens = run_ranks(1, job, str(tmp_path / "one"), 8)[0]
    kill = Fault(0, "save.commit", "kill", 2)  # of step 4
    with pytest.raises(RanksFailed, match="rank 0 died"):
        run_ranks(3, job, str(tmp_path), 8, faults=[kill], grace=2)
    losses, start, seen = run_ranks(2, job, str(tmp_path), 8)[0]
    assert start == 2
    assert losses == pytest.approx(whole[2:], rel=1e-9)
    assert seen == tokens


def example(*arguments: str) -> dict[int, float]:
    script: Any = import_module("examples.torchtitan_resume")
    return script.main(arguments)


def test_the_example_is_killed_and_goes_on_on_2_then_on_4_ranks_as_on_one(tmp_path: Path) -> None:
    many, one = ["--folder", str(tmp_path / "many")], ["--folder", str(tmp_path / "one")]
    (whole,) = run_ranks(1, example, *one)
    assert list(whole) == list(range(1, 13))
    assert whole[12] < whole[1]
    kill = Fault(0, "save.commit", "kill", 2)  # of step 8
    with pytest.raises(RanksFailed):  # a save in the background: the others may fail first
        run_ranks(3, example, *many, faults=[kill], grace=2)
    second = run_ranks(2, example, *many, "--stop", "7")[0]
    assert list(second) == [5, 6, 7]  # step 8 was not committed
    third = run_ranks(4, example, *many)[0]
    assert second | third == pytest.approx({n: whole[n] for n in range(5, 13)}, rel=1e-6)


def job_of_torchtitan(folder: str) -> dict[str, torch.Tensor]:
    """A step that torchtitan's own manager saves; the weights."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    optimizers, schedulers = containers(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizers.step()
    schedulers.step()
    manager = titan.CheckpointManager(
        setting(last_save_model_only=False),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": Trainer()},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.save(2, last_step=True)
    manager.close()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def job_begin(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = anyrank.TrainState(model, optimizer)
    with anyrank.Checkpoints(f"{folder}/ours", state) as checkpoints:
        report = checkpoints.resume(f"{folder}/checkpoint/step-2")
    assert report is not None
    moments = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return moments, {name: str(part) for name, part in report.components.items()}


def test_what_torchtitan_itself_saved_is_resumed(tmp_path: Path) -> None:
    (saved, *_) = run_ranks(2, job_of_torchtitan, str(tmp_path))
    for weights, parts in run_ranks(3, job_begin, str(tmp_path)):
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
        assert parts["model"] in ("exact", "resharded")
        assert parts["optimizer"] in ("exact", "resharded")


def job_initial(folder: str) -> None:
    test_from_dcp.job_save(folder)
    model = tools.seeded(1)
    manager = CheckpointManager(
        setting(initial_load_path=f"{folder}/torchtitan"),
        dataloader=None,
        model_parts=[model],
        optimizers=SimpleNamespace(optimizers=[tools.optimizer_of(model)]),
        lr_schedulers=SimpleNamespace(schedulers=[]),
        states={},
        base_folder=folder,
    )
    assert manager.load()
    expected = tools.trained()[0].state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=1e-12, atol=1e-12)
    manager.close()


@pytest.mark.filterwarnings("ignore")
def test_a_run_begins_with_the_weights_of_a_torchtitan_step(tmp_path: Path) -> None:
    run_ranks(1, job_initial, str(tmp_path))


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

    with pytest.raises(
        ValueError, match=r"pipeline parallelism \(2 model parts\) is not supported"
    ):
        make(2)
    with pytest.raises(ValueError, match="initial_load_in_hf is not supported"):
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
