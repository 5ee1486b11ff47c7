"""Many small tensors: what a tensor costs beside its bytes, in `load` and in torch's own way.

    python benchmarks/small_tensors.py               # two minutes; results/small_tensors.json
    python benchmarks/small_tensors.py --repeats 3

20,000 tensors of 4 KiB in one safetensors file, into a real model: `load_file` with
`load_state_dict`, and `anyrank.load`, in turn, each first in every other repetition. In one process
and in two under DDP, where each rank does the same. For modules of different sizes, as
`load_state_dict` looks through all keys once for each module. CPU seconds are of one process (the
slower one); on a machine with other work they tell more than the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from figures import keep, ratios
from machine import describe_machine, load_average
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

CASES = ((1, 20), (1, 200), (1, 20_000), (2, 20_000))  # ranks, parameters of a module
NUMEL = 1024
GOAL = 1.2
LIMIT_SEC = 300.0

Took = dict[str, dict[str, list[float]]]  # way -> clock -> seconds of each repetition


class Layer(nn.Module):
    """Parameters of 4 KiB each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(NUMEL)))


def build(tensors: int, per_module: int) -> nn.ModuleList:
    """So many parameters, in modules of so many."""
    return nn.ModuleList(Layer(per_module) for _ in range(tensors // per_module))


def job(path: str, tensors: int, per_module: int, repeats: int) -> Took:
    """Seconds of both ways in this process, in turn; the first repetition warms up."""
    plain = build(tensors, per_module)
    model: nn.Module = DistributedDataParallel(plain) if dist.is_initialized() else plain
    ways: dict[str, Callable[[], object]] = {
        "torch": lambda: plain.load_state_dict(load_file(path)),
        "anyrank": lambda: anyrank.load(model, path),
    }
    took: Took = {way: {"clock": [], "cpu": []} for way in ways}
    for number in range(repeats + 1):
        for way in [*ways][:: 1 if number % 2 else -1]:
            gc.collect()
            if dist.is_initialized():
                dist.barrier()
            clock, cpu = time.perf_counter(), time.process_time()
            ways[way]()
            if number:
                took[way]["clock"].append(time.perf_counter() - clock)
                took[way]["cpu"].append(time.process_time() - cpu)
    return took


def measure(ranks: int, tensors: int, per_module: int, repeats: int) -> dict[str, Any]:
    """One row: medians of the ratios of the repetitions, and of the seconds."""
    with tempfile.TemporaryDirectory(prefix="anyrank-small-") as folder:
        path = f"{folder}/model.safetensors"
        names = build(tensors, per_module).state_dict()
        save_file({name: torch.randn(NUMEL) for name in names}, path)
        arguments = (path, tensors, per_module, repeats)
        one = ranks == 1
        every = [job(*arguments)] if one else run_ranks(ranks, job, *arguments, timeout=LIMIT_SEC)
    row: dict[str, Any] = {"ranks": ranks, "per_module": per_module}
    for clock in ("clock", "cpu"):
        slowest: dict[str, list[float]] = {}
        for way in every[0]:
            rounds = zip(*(each[way][clock] for each in every), strict=True)
            slowest[way] = [max(seconds) for seconds in rounds]
        medians = {way: statistics.median(seconds) for way, seconds in slowest.items()}
        row[clock] = {
            "ratio": ratios(slowest["anyrank"], slowest["torch"]),
            "seconds": medians,
        }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    before = load_average()
    rows = [measure(ranks, options.tensors, per, options.repeats) for ranks, per in CASES]
    result = describe_machine() | {"tensors": options.tensors, "n": options.repeats, "goal": GOAL}
    result |= {"load_average": [before, load_average()], "rows": rows}
    keep("small_tensors", result)


if __name__ == "__main__":
    main()
