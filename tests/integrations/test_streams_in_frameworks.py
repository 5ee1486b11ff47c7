"""Streams under frameworks: started on 3 ranks, killed on 2, ended on 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts import TORCHRUN
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from anyrank.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

SIZES = [7, 0, 30, 3, 12, 5, 25, 1, 1, 16]  # 100 rows


class Rows(IterableDataset[Any]):
    """A stream that is cut into shards, as Hugging Face's."""

    num_shards = len(SIZES)

    def __init__(self, shards: tuple[int, ...] = tuple(range(len(SIZES)))) -> None:
        self.shards = shards

    def shard(self, *, num_shards: int, index: int) -> Rows:
        assert num_shards == len(SIZES)
        return Rows((index,))

    def __iter__(self) -> Iterator[Any]:
        for shard in self.shards:
            for row in range(SIZES[shard]):
                x = torch.tensor([shard / 9, row / 30])
                yield {"x": x, "y": x.sum()[None], "id": torch.tensor(shard * 100 + row)}


class Net(nn.Module):
    """As the Trainer asks for it; keeps the ids of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor, id: torch.Tensor) -> dict[str, Any]:
        self.seen.append(id.tolist())
        return {"loss": (self.layer(x) - y).square().mean()}


class Killed(Exception):
    """As a kill: nothing is saved after it."""


def accelerate_job(folder: str, until: int, kill: int | None, workers: int = 0) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    from anyrank.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(folder=folder, global_batch=12, every=3, cpu=True, exact=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = DataLoader(Rows(), batch_size=2, num_workers=workers)
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    seen: dict[int, list[list[int]]] = {}
    step = 0
    with suppress(Killed):
        accelerator.load_state()
        for _ in count():
            for batch in data:
                step = data.step.number
                if not data.step.is_copy:
                    seen.setdefault(step, []).append(batch["id"].tolist())
                accelerator.backward(model(**batch)["loss"])
                if step == kill:
                    raise Killed
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients and step + 1 == until:
                    break
            if step + 1 == until:
                break
        accelerator.end_training()
    receipts = [*data.loader.receipts]
    weights = [p.detach().tolist() for p in net.parameters()]
    accelerator.free_memory()
    return {"seen": seen, "receipts": receipts, "weights": weights}


def trainer_job(folder: str, until: int, kill: int | None, workers: int = 0) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from anyrank.integrations.transformers import elastic

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == kill:
                raise Killed

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == until

    args = TrainingArguments(
        folder + "-out",
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=40,
        report_to=[],
        disable_tqdm=True,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        dataloader_num_workers=workers,
    )
    net = Net()
    trainer = Trainer(net, args, train_dataset=Rows(), callbacks=[Stop()])
    trainer = elastic(trainer, folder, global_batch=12, every=3, exact=True)
    with suppress(Killed):
        trainer.train(resume_from_checkpoint=True)
    receipts = [*trainer.elastic.loader.receipts]
    weights = [p.detach().tolist() for p in net.parameters()]
    return {
        "seen": {},
        "receipts": receipts,
        "weights": weights,
        "step": trainer.elastic.state.step,
    }


def lightning_job(folder: str, until: int, kill: int | None, workers: int = 0) -> dict[str, Any]:
    import lightning

    from anyrank.integrations.lightning import Elastic

    validated: list[int] = []
    epochs: list[tuple[int, int]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(self.trainer.global_step)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == kill:
                raise Killed

        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = self.trainer.global_step == until

        def on_train_epoch_end(self) -> None:
            epochs.append((self.trainer.current_epoch, self.trainer.global_step))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": schedule}  # once an epoch

    module = Module()
    elastic = Elastic(folder, global_batch=12, every=3, exact=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if torch.distributed.get_world_size() == 1 else "auto",
        max_epochs=2,
        callbacks=[elastic],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    data = DataLoader(Rows(), batch_size=2, num_workers=workers)
    with suppress(Killed):
        trainer.fit(module, data, DataLoader([{"x": torch.ones(2)}]))
    assert elastic.loader is not None
    assert elastic.state is not None
    return {
        "seen": {},
        "receipts": [*elastic.loader.receipts],
        "weights": [p.detach().tolist() for p in module.net.parameters()],
        "step": elastic.state.step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "ends": (epochs, validated),
    }


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("job", [accelerate_job, trainer_job, lightning_job])
def test_a_stream_goes_on_on_other_ranks(job: Any, workers: int, tmp_path: Path) -> None:
    last = 99 if job is lightning_job else 36  # it ends after two epochs
    expected = run_ranks(1, job, str(tmp_path / "one"), last, None, env=TORCHRUN)[0]
    folder = str(tmp_path / "run")
    ends: list[Any] = []
    for size, until, kill in ((3, 7, None), (2, last, 11), (4, last, None)):
        rows = run_ranks(size, job, folder, until, kill, workers, env=TORCHRUN)
        ends.append(rows[0].get("ends"))
        for step in expected["seen"] if kill is None else ():
            parts = [part for row in rows for part in row["seen"].get(step, ())]
            assert not parts or sorted(parts) == sorted(expected["seen"][step]), step
    assert all(row["weights"] == expected["weights"] for row in rows)
    assert rows[0]["receipts"] == expected["receipts"]
    assert expected["receipts"][0].verdict.startswith(
        "each row read was used once: 100 rows in 10 shards"
    )
    if job is lightning_job:  # an epoch of unknown length has an end
        epochs, validated = expected["ends"]
        assert [epoch for epoch, _ in epochs] == [0, 1]
        assert validated == [step for _, step in epochs]
        # A trainer that is told to stop in step 7 ends that epoch's loop there, as Lightning does.
        of_runs = [(set(ends), set(steps)) for ends, steps in ends]
        told_ends, told_steps = (set().union(*found) for found in zip(*of_runs, strict=True))
        assert sorted(told_ends - {(0, 7)}) == epochs
        assert sorted(told_steps - {7}) == validated
        assert rows[0]["lr"] == expected["lr"] == 0.05 / 4
