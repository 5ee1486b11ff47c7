"""The time of a training step with an integration, beside the framework alone.

    python benchmarks/integrations.py                      # results/integrations.json
    python benchmarks/integrations.py --names lightning    # those alone, and nothing is written
    python benchmarks/integrations.py --quick              # two rounds, nothing is written

DDP on two CPU ranks, each with two microbatches of 8 sequences, and AdamW. What an integration adds
to a step depends on the numbers of microbatches, samples and parameters, and not on their size: so
a step is measured that is about as long as one on a GPU (an encoder of MiniLM's sizes, 16 vectors a
sequence), and one that is as short as steps get (four layers), where the addition is seen best.
Both train in turn, each round on fresh ranks, two minutes for each. No step is saved within a
round. The samples are read in the ranks' own processes, so that seeding each of them counts.

glibc keeps the memory of a step's buffers here: whether it gives them back to the kernel after each
backward, which is up to 5 ms of page faults, depends on what happened to be freed before.

Of all steps the fastest tenth is compared, in wall time and in CPU time of rank 0: on a machine
that others use too, the slower ones show what those did. The medians are there as well.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accelerate
import bench
import lightning
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from bench import Case, Run, tell
from launch import Launcher
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyrank
import anyrank.integrations.transformers as trainer_integration

RANKS, MICROBATCH, GLOBAL_BATCH = 2, 8, 32
PER_STEP = GLOBAL_BATCH // MICROBATCH // RANKS  # microbatches of a rank
WARM = 8  # steps of a round that do not count, as the first ones check more than the others
KEEP_MEMORY = dict.fromkeys(
    ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 32)
)  # of glibc

Clock = tuple[float, float]  # wall and CPU, in seconds


def now() -> Clock:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Workload:
    """What is trained, and for how long."""

    width: int
    length: int  # vectors in a sequence
    steps: int  # of a round
    rounds: int
    encoder: bool

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        if self.encoder:
            return Encoder(self.width)
        layers = ((nn.Linear(self.width, self.width), nn.GELU()) for _ in range(4))
        return nn.Sequential(*itertools.chain(*layers))

    def data(self) -> torch.Tensor:
        return torch.randn(GLOBAL_BATCH * self.steps, self.length, self.width)

    def rows(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.data()), batch_size=MICROBATCH, shuffle=True)


WORKLOADS = {
    "encoder": Workload(width=384, length=16, steps=20, rounds=6, encoder=True),
    "four layers": Workload(width=256, length=48, steps=96, rounds=8, encoder=False),
}


class Encoder(nn.Module):
    """Six layers of MiniLM's sizes, over vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 4 * width,
        }
        config = transformers.BertConfig(vocab_size=1, hidden_size=width, **sizes)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.bert.embeddings.word_embeddings.requires_grad_(False)  # vectors come in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(inputs_embeds=x).last_hidden_state
        return hidden


def with_lightning(work: Workload, folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with the callback where there is a folder."""
    ends: list[Clock] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.network()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if folder or (batch_idx + 1) % PER_STEP == 0:
                ends.append(now())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    elastic = anyrank.integrations.lightning.Elastic
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=1 if folder else PER_STEP,
        callbacks=[elastic(folder, global_batch=GLOBAL_BATCH)] if folder else [],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(Module(), work.rows())
    return ends


def with_accelerate(work: Workload, folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with anyrank's Accelerator where there is a folder."""
    AcceleratorState._reset_state(reset_partial_state=True)  # what it keeps from the round before
    GradientState._reset_state()
    if folder:
        kind: Any = anyrank.integrations.accelerate.Accelerator
        accelerator = kind(cpu=True, folder=folder, global_batch=GLOBAL_BATCH)
    else:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=PER_STEP)
    model = work.network()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), work.rows()
    )
    ends: list[Clock] = []
    for (batch,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ends.append(now())
    accelerator.free_memory()
    return ends


def with_transformers(work: Workload, folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with an elastic Trainer where there is a folder."""
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    ends: list[Clock] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    data = [{"x": row} for row in work.data()]
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=1 if folder else PER_STEP,
            num_train_epochs=1,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            max_grad_norm=0.0,
            optim="adamw_torch",
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        trainer: Any = transformers.Trainer(
            Net(),
            arguments,
            train_dataset=data,
            callbacks=[Ends()],  # type: ignore[arg-type]
        )
        if folder:
            trainer = trainer_integration.elastic(trainer, folder, global_batch=GLOBAL_BATCH)
        trainer.train()
    return ends


CONTENDERS: dict[str, Callable[[Workload, str | None], list[Clock]]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}


def durations(ends: list[Clock]) -> list[Clock]:
    """Of each step after the first ones, in seconds."""
    steps = zip(ends[WARM:], ends[WARM + 1 :], strict=False)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in steps]


def train(name: str, what: str, folder: str | None) -> list[Clock]:
    """The steps of a round on this rank, with anyrank where there is a folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"
    return durations(CONTENDERS[name](WORKLOADS[what], folder))


def row_of(launcher: Launcher, name: str, what: str, rounds: int) -> Run:
    """A row of the results: each round of either way on fresh ranks, in turn."""

    def once(way: str, number: int) -> Run:
        with tempfile.TemporaryDirectory() as top:
            folder = f"{top}/run" if way == "anyrank" else None
            return {"steps": launcher.values(RANKS, train, name, what, folder)[0]}

    runs = Case(name, ("alone", "anyrank"), once).run(rounds, is_told=False)
    steps = {way: [step for run in of for step in run["steps"]] for way, of in runs.items()}
    row: Run = {"framework": name, "model": what, "rounds": rounds, "steps": len(steps["alone"])}
    for kind, clock in enumerate(("wall", "cpu")):
        cuts = {
            way: statistics.quantiles((step[kind] for step in of), n=10)
            for way, of in steps.items()
        }
        for cut, part in ((0, "fastest_tenth"), (4, "median")):
            alone, ours = (1e3 * cuts[way][cut] for way in ("alone", "anyrank"))
            row[f"{clock}_{part}"] = {
                "alone_ms": round(alone, 2),
                "anyrank_ms": round(ours, 2),
                "added_ms": round(ours - alone, 2),
                "ratio": round(ours / alone, 4),
            }
    return row


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """A row for each framework and workload."""
    os.environ |= KEEP_MEMORY  # before the ranks' server starts
    rows: list[Run] = []
    for what, name in itertools.product(WORKLOADS, options.names):
        rounds = options.rounds or WORKLOADS[what].rounds
        rows.append(row_of(launcher, name, what, rounds))
        tell("steps", rows[-1])
    return {"rows": rows}


if __name__ == "__main__":
    names = sorted(CONTENDERS)
    bench.main("integrations", measure, {"rounds": 2}, ["names", "rounds"], names=names, rounds=0)
