"""What `Checkpoints(replicas_every=100)` costs: one comparison of all replicas over 100 steps.

    python benchmarks/replicas.py             # a minute on 2 ranks; results/replicas.json

DDP on 2 CPU ranks, Linear layers and AdamW, 240 MiB of weights and optimizer state that both ranks
hold. A run trains some steps and compares after the last one. The figure is the comparison's time
on the slower rank over 100 times the median step, from `microbatches()` to `step_done()`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch
from figures import keep, spread
from machine import describe_machine, load_average
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.resume import checkpoints
from anyrank.testing import run_ranks

WIDTH, LAYERS, ROWS = 1024, 20, 64  # 80 MiB of weights, three times that with AdamW's state
STEPS, EVERY = 10, 100
LIMIT_SEC = 600.0


def job_train(path: str) -> tuple[float, float]:
    """Seconds of the comparison, and of the median step without it, on this rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = anyrank.ElasticLoader(torch.randn(256, WIDTH), global_batch=ROWS, microbatch=ROWS // 2)
    state = anyrank.TrainState(model, optimizer, data=loader)
    check, spent, steps = checkpoints.check_replicas, 0.0, list[float]()

    def timed(*arguments: Any) -> None:
        nonlocal spent
        start = time.perf_counter()
        check(*arguments)
        spent += time.perf_counter() - start

    with patch.object(checkpoints, "check_replicas", timed):
        ckpts = anyrank.Checkpoints(path, state, replicas_every=STEPS)
        start = time.perf_counter()
        for step in ckpts.steps(until=STEPS):
            for x in step.microbatches(model):
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
            start = time.perf_counter()
        ckpts.close()
    assert spent
    return spent, statistics.median(steps[1:])


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    before, runs = load_average(), list[dict[str, float]]()
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="anyrank-replicas-") as path:
            every = run_ranks(2, job_train, path, timeout=LIMIT_SEC)
        spent, step = (max(values) for values in zip(*every, strict=True))
        runs.append({"sec": spent, "step_sec": step, "share": spent / (EVERY * step)})
        print(runs[-1], flush=True)
    shares = [run["share"] for run in runs]
    figure = spread(shares)
    shape = {"mib": 3 * 4 * LAYERS * WIDTH * WIDTH >> 20, "ranks": 2, "every": EVERY}
    result = describe_machine() | {"load_average": [before, load_average()]} | shape
    result |= {"share": figure | {"goal": 0.01}}
    print(f"share of the time: {figure}")
    keep("replicas", result)


if __name__ == "__main__":
    main()
