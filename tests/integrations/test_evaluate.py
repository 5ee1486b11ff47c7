"""The recipe of docs/evaluate.md gives one number, bit for bit, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.scripts import TORCHRUN
from tests.unit.house.test_docs import ROOT, find_blocks
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def from_page(name: str) -> Any:
    """A file that the page has, as a module."""
    blocks = {
        b.marks["file"]: b for b in find_blocks(ROOT / "docs/evaluate.md") if "file" in b.marks
    }
    module = ModuleType(name)
    with pytest.MonkeyPatch.context() as patch:
        if name != "evaluation":
            patch.setitem(sys.modules, "evaluation", from_page("evaluation"))
        block = blocks[f"{name}.py"]
        exec(compile(block.source, block.place, "exec"), vars(module))  # noqa: S102 - our own page
    return module


def recipe() -> Callable[..., float]:
    return from_page("evaluation").evaluate


def points(count: int = 83) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8), torch.randn(1)) for _ in range(count)]


def loss_sum(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return nn.functional.mse_loss(model(x), y, reduction="sum"), len(y)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 1))


def in_a_loop(wrapper: str) -> tuple[float, bool]:
    """Evaluated within a step, before its gradients are used: the number, and whether gradients,
    random numbers and the training's mode are left alone.
    """
    model = net()
    if wrapper == "ddp" and torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp" and torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    data = points()
    for step in anyrank.ElasticLoader(data, global_batch=32, microbatch=4):
        for batch in step.microbatches(model):
            total, count = loss_sum(model, batch)
            step.backward(total / count)
        gradients = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in gradients if gradient is not None]
        torch.manual_seed(5)
        found = recipe()(model, data, loss_sum, microbatch=4)
        drawn = torch.rand(3)
        torch.manual_seed(5)
        is_same = torch.equal(drawn, torch.rand(3)) and model.training
        after = [parameter.grad for parameter in model.parameters()]
        for copy, new in zip(copies, after, strict=True):
            is_same &= new is not None and bool((copy == new).all())
        return found, is_same
    raise AssertionError("no step")


def within_the_microbatches(wrapper: str, evaluates: bool) -> list[float]:
    """The gradients of a step that was evaluated after its first backward, and their norm."""
    model = net()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    data, evaluate = points(), recipe()
    for step in anyrank.ElasticLoader(data, global_batch=32, microbatch=4):
        for number, batch in enumerate(step.microbatches(model)):
            total, count = loss_sum(model, batch)
            step.backward(total / count)
            if evaluates and number in (0, 3):
                evaluate(model, data, loss_sum, microbatch=4)
        if evaluates:
            with torch.no_grad():  # the step's own batches, once more
                for batch in step.microbatches(model):
                    loss_sum(model, batch)
        norm = float(step.clip_grad_norm_(0.1))
        parts: list[Any] = [parameter.grad for parameter in model.parameters()]
        wholes = [getattr(part, "full_tensor", lambda part=part: part)() for part in parts]
        return [norm, *(float(whole.double().sum()) for whole in wholes)]
    raise AssertionError("no step")


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_gradients_under_way_stay_while_a_model_is_evaluated(wrapper: str) -> None:
    expected = run_ranks(2, within_the_microbatches, wrapper, False)
    assert run_ranks(2, within_the_microbatches, wrapper, True) == expected
    assert expected[0][0] > 0.1


def train_without_gradients() -> None:
    model = net()
    with torch.no_grad():
        for step in anyrank.ElasticLoader(points(), global_batch=4, microbatch=4):
            for batch in step.microbatches(model):
                with torch.enable_grad():
                    total, count = loss_sum(model, batch)
                    step.backward(total / count)


def test_a_backward_within_an_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\)"):
        train_without_gradients()


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
def test_the_number_has_the_same_bits_on_any_number_of_ranks(wrapper: str) -> None:
    results = [r for n in (1, 2, 3) for r in run_ranks(n, in_a_loop, wrapper)]
    assert len(set(results)) == 1
    assert results[0][1]
    expected = net().eval()
    with torch.no_grad():
        sums = [float(loss_sum(expected, (x[None], y[None]))[0]) for x, y in points()]
    assert results[0][0] == pytest.approx(sum(sums) / len(sums), rel=1e-6)


def in_lightning(folder: str) -> float:
    import lightning

    from anyrank.integrations.lightning import Elastic

    evaluate = recipe()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            total, count = loss_sum(self, batch)
            return total / count

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net[0].parameters(), lr=0.0)

        def on_train_epoch_end(self) -> None:
            self.log("val", evaluate(self, points(), loss_sum, microbatch=4))

    data = torch.utils.data.DataLoader(points(24), batch_size=4)  # pyright: ignore[reportArgumentType]
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        enable_checkpointing=False,
        callbacks=[Elastic(f"{folder}/run", global_batch=12)],
        **quiet,
    )
    trainer.fit(Module(), data)
    return float(trainer.callback_metrics["val"])


def test_lightning_logs_the_same_number(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = [
        value
        for n in (1, 2)
        for value in run_ranks(n, in_lightning, str(tmp_path / str(n)), env=TORCHRUN)
    ]
    ((whole, _),) = run_ranks(1, in_a_loop, "")
    assert found == [pytest.approx(whole, rel=1e-6)] * 3  # Lightning keeps it as float32
    assert len(set(found)) == 1


def in_the_trainer(folder: str) -> list[float]:
    import transformers
    from accelerate.state import AcceleratorState
    from tests.integrations.test_trainer import Rows, arguments, model

    from anyrank.integrations.transformers import elastic

    AcceleratorState._reset_state(True)  # pyright: ignore[reportPrivateUsage]
    transformers.logging.set_verbosity_error()
    rows = Rows()
    options: dict[str, Any] = {"max_steps": 4, "learning_rate": 0.0, "eval_strategy": "steps"}
    trainer = from_page("same_loss").SameLossTrainer(
        model("plain"),
        arguments(folder, eval_steps=2, **options),
        train_dataset=rows,
        eval_dataset=torch.utils.data.Subset(rows, range(13)),
    )
    elastic(trainer, f"{folder}/run", global_batch=12).train()
    return [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]


def test_the_trainer_logs_the_same_number(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = [
        values
        for n in (1, 2)
        for values in run_ranks(n, in_the_trainer, str(tmp_path / str(n)), env=TORCHRUN)
    ]
    assert len(found[0]) == 2
    assert {tuple(values) for values in found} == {(found[0][0],) * 2}
