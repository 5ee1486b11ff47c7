"""The time of a training step with an integration, beside the framework alone.

    python benchmarks/integrations.py [lightning accelerate transformers]

DDP on two CPU ranks, each with two microbatches of 8 sequences, and AdamW: some 40 ms of CPU time a
step, and few parameters, so that memory, which varies, is little of it. What an integration adds to
a step depends on the numbers of microbatches, samples and parameters, and not on their size. Both
train in turn, in the same processes, a minute for each framework. No step is saved within a round.
The samples are read in the ranks' own processes, so that seeding each of them counts.

Of all steps the fastest tenth is compared, in wall time and in CPU time of rank 0: on a machine
that others use too, the slower ones show what those did. The medians are there as well.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anyrank.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "integrations.json"
RANKS, MICROBATCH, GLOBAL_BATCH, WIDTH, LENGTH = 2, 8, 32, 256, 48
STEPS, WARM = 32, 2  # of a round
ROUNDS, BUDGET_SEC = 4, 60  # at least so many rounds, and more until then

Clock = tuple[float, float]  # wall and CPU, in seconds


def now() -> Clock:
    return time.perf_counter(), time.process_time()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def rows() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(GLOBAL_BATCH * STEPS, LENGTH, WIDTH))
    return DataLoader(data, batch_size=MICROBATCH, shuffle=True)


def with_lightning(folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with the callback where there is a folder."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    import anyrank

    ends: list[Clock] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            per_step = 1 if folder else GLOBAL_BATCH // MICROBATCH // RANKS
            if (batch_idx + 1) % per_step == 0:
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
        accumulate_grad_batches=1 if folder else GLOBAL_BATCH // MICROBATCH // RANKS,
        callbacks=[elastic(folder, global_batch=GLOBAL_BATCH)] if folder else [],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(Module(), rows())
    return ends


def with_accelerate(folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with anyrank's Accelerator where there is a folder."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    import anyrank

    AcceleratorState._reset_state(reset_partial_state=True)  # what it keeps from the round before
    GradientState._reset_state()
    if folder:
        kind: Any = anyrank.integrations.accelerate.Accelerator
        accelerator = kind(cpu=True, folder=folder, global_batch=GLOBAL_BATCH)
    else:
        count = GLOBAL_BATCH // MICROBATCH // RANKS
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=count)
    model = network()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), rows()
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


def with_transformers(folder: str | None) -> list[Clock]:
    """When each step of one epoch ended, with an elastic Trainer where there is a folder."""
    import transformers
    from accelerate.state import AcceleratorState

    import anyrank.integrations.transformers as integration

    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    ends: list[Clock] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    data = [{"x": row} for row in torch.randn(GLOBAL_BATCH * STEPS, LENGTH, WIDTH)]
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=1 if folder else GLOBAL_BATCH // MICROBATCH // RANKS,
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
            trainer = integration.elastic(trainer, folder, global_batch=GLOBAL_BATCH)
        trainer.train()
    return ends


CONTENDERS: dict[str, Callable[[str | None], list[Clock]]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}


def durations(ends: list[Clock]) -> list[Clock]:
    """Of each step after the first ones, in seconds."""
    steps = zip(ends[WARM:], ends[WARM + 1 :], strict=False)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in steps]


def job(name: str, folder: str, number: int) -> tuple[list[Clock], list[Clock]]:
    """The steps of a round on this rank: those of the framework alone, those with anyrank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[bool, list[Clock]] = {}
    for with_anyrank in (False, True) if number % 2 else (True, False):
        path = f"{folder}/{number}"
        found[with_anyrank] = durations(CONTENDERS[name](path if with_anyrank else None))
        shutil.rmtree(path, ignore_errors=True)
    return found[False], found[True]


def measure(name: str) -> dict[str, Any]:
    """A row of the results."""
    both: tuple[list[Clock], list[Clock]] = ([], [])
    number, end = 0, time.monotonic() + BUDGET_SEC
    with tempfile.TemporaryDirectory() as folder:
        while number < ROUNDS or time.monotonic() < end:
            environ = {"TORCHELASTIC_RUN_ID": "benchmark"}
            pair = run_ranks(RANKS, job, name, folder, number, env=environ, timeout=300)[0]
            for steps, new in zip(both, pair, strict=True):
                steps += new if number else []  # the first round imports
            number += 1
    row: dict[str, Any] = {"framework": name, "rounds": number - 1, "steps": len(both[0])}
    for kind, what in enumerate(("wall", "cpu")):
        deciles = [statistics.quantiles((step[kind] for step in one), n=10) for one in both]
        for number, part in ((0, "fastest_tenth"), (4, "median")):
            alone, with_anyrank = (1e3 * cuts[number] for cuts in deciles)
            row[f"{what}_{part}"] = {
                "alone_ms": round(alone, 2),
                "anyrank_ms": round(with_anyrank, 2),
                "added_ms": round(with_anyrank - alone, 2),
                "ratio": round(with_anyrank / alone, 4),
            }
    return row


def main() -> None:
    """Measure, print, and keep the rows of other frameworks that the file has."""
    names = sys.argv[1:] or list(CONTENDERS)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    for name in names:
        row = measure(name)
        print(row)
        rows = [one for one in rows if one["framework"] != name] + [row]
    result = {**describe_machine(), "rows": sorted(rows, key=lambda row: row["framework"])}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
