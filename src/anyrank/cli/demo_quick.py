"""`anyrank demo --quick`: load and save a small model on 2 ranks, resume it on 1; half a minute.

The ranks run this module too, as `python -m anyrank.cli.demo_quick FOLDER UNTIL`. It needs only
anyrank itself, so it shows whether an installation works.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import anyrank
from anyrank.cli import torchrun

RANKS, STEPS, EVERY = 2, 20, 5
SAMPLES, GLOBAL_BATCH, MICROBATCH, WIDTH = 480, 32, 4, 256
WEIGHTS = "weights.pt"


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random vectors and their sums; the loader seeds the random numbers for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8)
        return x, x.sum().view(1)


def build() -> nn.Sequential:
    """The model, with initial values unless under `anyrank.meta()`."""
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 1))


# -- on each rank ---------------------------------------------------------------------------------


def load(model: nn.Module, path: str) -> dict[str, Any]:
    """Load the weights, and compare all values with the file."""
    report = anyrank.load(model, path)
    saved = torch.load(path, weights_only=True)
    whole = {name: _whole(value) for name, value in model.state_dict().items()}
    equal = all(torch.equal(whole[name], saved[name]) for name in saved)
    return {"tensors": report.tensors, "read_bytes": report.bytes_read, "equal": equal}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(folder: str, until: int) -> dict[str, Any]:
    """Resume or start the run of a folder, and train until a step."""
    random.seed(0)
    torch.manual_seed(0)
    with anyrank.meta():
        model = build()
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = anyrank.ElasticLoader(
        Sums(), global_batch=GLOBAL_BATCH, microbatch=MICROBATCH, exact=True
    )
    state = anyrank.TrainState(model, optimizer, data=loader)
    results: dict[str, Any] = {}
    with anyrank.Checkpoints(os.path.join(folder, "run"), state, every=EVERY) as ckpts:
        report = ckpts.resume("auto")
        if report is None:
            results["load"] = load(model, os.path.join(folder, os.pardir, WEIGHTS))
        for step in ckpts.steps(until=until):
            for x, y in step.microbatches(model):
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if report is not None:
        results["resume"] = {"step": report.step, "components": report.components}
    return results | {"receipts": loader.receipts}


def main() -> None:
    """Train in each folder given by the arguments; rank 0 writes results.json there."""
    *folders, until = sys.argv[1:]
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    for folder in folders:
        results = train(folder, int(until))
        if not dist.is_initialized() or dist.get_rank() == 0:
            with open(os.path.join(folder, "results.json"), "w", encoding="utf-8") as file:
                json.dump(results, file)
    if dist.is_initialized():
        dist.destroy_process_group()


# -- in the command -------------------------------------------------------------------------------


def run(environ: Mapping[str, str]) -> dict[str, Any]:
    """The results of both legs of the run, and of the same run on one rank without interruption.

    Raises:
        AnyrankError: a rank failed, or did not end in time.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="anyrank-demo-") as scratch:
        log = os.path.join(scratch, "log")
        moved, alone = (os.path.join(scratch, name) for name in ("moved", "alone"))
        for folder in (moved, alone):
            os.mkdir(folder)
        torch.manual_seed(0)
        torch.save(build().state_dict(), os.path.join(scratch, WEIGHTS))
        program = ("-m", "anyrank.cli.demo_quick")
        torchrun.run(torchrun.line(RANKS, *program, moved, str(STEPS // 2)), log, environ)
        first = _results(moved)
        torchrun.run([sys.executable, *program, moved, alone, str(STEPS)], log, environ)
        second = _results(moved)
        compared = anyrank.diff(*(os.path.join(folder, "run") for folder in (moved, alone)))
    results = {
        "ranks": [RANKS, 1],
        "torch": torch.__version__,
        "load": first["load"],
        "resume": second["resume"],
        "receipts": second["receipts"],
        "equal_steps": compared.steps_equal,
        "different_step": compared.step,
        "seconds": time.perf_counter() - start,
    }
    return results | {"findings": findings_of(results)}


def _results(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "results.json"), encoding="utf-8") as file:
        return dict(json.load(file))


def findings_of(results: Mapping[str, Any]) -> list[str]:
    """The findings, as sentences."""
    found: list[str] = []
    if not results["load"]["equal"]:
        found.append("the loaded values are not those of the file")
    if results["resume"]["step"] != STEPS // 2:
        found.append(f"resumed at step {results['resume']['step']}, saved at step {STEPS // 2}")
    verdicts = [receipt[2] for receipt in results["receipts"]]
    if not verdicts or any(verdict != "exactly once" for verdict in verdicts):
        found.append(f"samples were not seen exactly once: {results['receipts']}")
    if results["different_step"] is not None or STEPS not in results["equal_steps"]:
        equal = results["equal_steps"]
        found.append(f"weights and optimizer have the bits of one rank at steps {equal} alone")
    return found


def lines(results: Mapping[str, Any]) -> list[str]:
    """The summary, without its title."""
    loaded, resumed = results["load"], results["resume"]
    kib = " ".join(f"{nbytes / 1024:.1f}" for nbytes in loaded["read_bytes"])
    parts = ", ".join(f"{name} {outcome}" for name, outcome in resumed["components"].items())
    seen = ", ".join(f"{count} {verdict}" for _, count, verdict in results["receipts"])
    same = ", ".join(map(str, results["equal_steps"]))
    return [
        f"  load      {loaded['tensors']} tensors on {RANKS} ranks, which read {kib} KiB",
        f"  save      step {resumed['step']} of {STEPS}",
        f"  resume    on 1 rank: {parts}",
        f"  samples   of the first epoch: {seen}",
        f"  bits      of weights and optimizer: as of a run on one rank, at steps {same}",
        f"  took      {results['seconds']:.0f} s",
    ]


if __name__ == "__main__":
    main()
