"""The time of a training step with an integration, beside the framework alone.

    python benchmarks/integrations.py [lightning accelerate]

DDP on two CPU ranks, each with two microbatches of 8 rows, and AdamW on 17 million parameters. Both
train in turn, in the same processes, for a number of rounds; a round's ratio is that of the median
steps. No step is saved within a round. Wall time, and the CPU time of rank 0, which other work on
the machine disturbs less. The rows are read in the ranks' own processes, so that seeding each of
them (0.07 ms) counts.
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
RANKS, MICROBATCH, GLOBAL_BATCH, WIDTH = 2, 8, 32, 2048
ROUNDS, STEPS, WARM = 9, 12, 2

Clock = tuple[float, float]  # wall and CPU, in seconds


def now() -> Clock:
    return time.perf_counter(), time.process_time()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def rows() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(GLOBAL_BATCH * STEPS, WIDTH))
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


CONTENDERS: dict[str, Callable[[str | None], list[Clock]]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


def medians(ends: list[Clock]) -> Clock:
    """The median step, in seconds."""
    steps = list(zip(ends[WARM:], ends[WARM + 1 :], strict=False))
    wall, cpu = (statistics.median(b[k] - a[k] for a, b in steps) for k in (0, 1))
    return wall, cpu


def job(name: str, folder: str) -> list[tuple[Clock, Clock]]:
    """The median step of each round, alone and with anyrank, on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: list[tuple[Clock, Clock]] = []
    for number in range(ROUNDS):
        train, path = CONTENDERS[name], f"{folder}/{number}"
        if number % 2:
            with_anyrank, alone = medians(train(path)), medians(train(None))
        else:
            alone, with_anyrank = medians(train(None)), medians(train(path))
        found.append((alone, with_anyrank))
        shutil.rmtree(path, ignore_errors=True)
    return found[1:]  # the first one imports


def measure(name: str) -> dict[str, Any]:
    """A row of the results."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {"TORCHELASTIC_RUN_ID": "benchmark"}
        rounds = run_ranks(RANKS, job, name, folder, env=environ, timeout=900)[0]
    row: dict[str, Any] = {"framework": name, "rounds": len(rounds), "steps": STEPS - WARM - 1}
    for kind, what in enumerate(("wall", "cpu")):
        ratios = sorted(elastic[kind] / alone[kind] for alone, elastic in rounds)
        row[f"{what}_ratio"] = round(statistics.median(ratios), 4)
        row[f"{what}_ratio_quartiles"] = [
            round(cut, 4) for cut in statistics.quantiles(ratios, n=4)[::2]
        ]
        row[f"{what}_step_ms"] = round(1e3 * statistics.median(a[kind] for a, _ in rounds), 2)
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
