"""Beside the common case: keys that fit nowhere, and shards of a matrix's columns.

    python benchmarks/edges.py               # two minutes; results/edges.json
    python benchmarks/edges.py --repeats 3

Keys: a model of 20,000 modules with a parameter each, and a source of as many keys of which none
fits: CPU seconds until the error that names them, in `anyrank.load` and in torch's
`load_state_dict(strict=True)`. torch's grow with the square of the number of modules, so it is
asked for 2,000.

Columns: a matrix of 256 MiB in one safetensors file, in the page cache, into `Shard(1)` on 2 and 4
ranks: `strategy="own"`, `"stripe"`, and DCP with its reader for safetensors, in turn. Seconds are
those of the slowest rank. DCP maps the file and does not say what it reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import keep, ratios, spread
from machine import describe_machine, load_average, warm_files
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

import anyrank
from anyrank.testing import run_ranks

MIB = 1 << 20
KEYS = (2_000, 20_000)
MOST_KEYS_OF_TORCH = 2_000
GOAL_SEC = 1.0
RANKS = (2, 4)
WIDTH = 8192  # 256 MiB of float32
LIMIT_SEC = 300.0


def measure_keys(count: int, repeats: int) -> dict[str, Any]:
    """One row: CPU seconds of the error."""
    model = nn.ModuleList(nn.PReLU() for _ in range(count))
    source = {f"y.{n}.q{n}": torch.zeros(1) for n in range(count)}
    ways: dict[str, Callable[[], object]] = {"anyrank": lambda: anyrank.load(model, source)}
    if count <= MOST_KEYS_OF_TORCH:
        ways["torch"] = lambda: model.load_state_dict(source)
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats + 1):  # the first one warms up
        for way in [*ways][:: 1 if number % 2 else -1]:
            gc.collect()
            start = time.process_time()
            try:
                ways[way]()
                raise AssertionError(f"{way}: no error")
            except (anyrank.LoadError, RuntimeError):
                took[way].append(time.process_time() - start)
    row = {"keys": count} | {way: spread(seconds[1:]) for way, seconds in took.items()}
    print(json.dumps(row), flush=True)
    return row


def job(folder: str, repeats: int) -> dict[str, list[tuple[float, int]]]:
    """Seconds of each way in this process, and bytes that all ranks read; the first warms up."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
    model.weight = nn.Parameter(zeros(WIDTH, WIDTH, device_mesh=mesh, placements=[Shard(1)]))

    def ours(strategy: Any) -> int:
        return sum(anyrank.load(model, folder, strategy=strategy).bytes_read)

    def theirs() -> int:
        dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(folder))
        return 0

    ways = {"own": lambda: ours("own"), "stripe": lambda: ours("stripe"), "dcp": theirs}
    took: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        for way in [*ways][:: 1 if number % 2 else -1]:
            model.weight.detach().to_local().zero_()
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            nbytes = ways[way]()
            took[way].append((time.perf_counter() - start, nbytes))
            assert model.weight.detach().to_local().all(), f"{way}: left zeros"
    return {way: runs[1:] for way, runs in took.items()}


def measure_columns(ranks: int, folder: str, repeats: int) -> dict[str, Any]:
    """One row: what each way takes, and ratios of the same repetition."""
    every = run_ranks(ranks, job, folder, repeats, timeout=LIMIT_SEC)
    row: dict[str, Any] = {"ranks": ranks}
    slowest: dict[str, list[float]] = {}
    for way, runs in every[0].items():
        rounds = zip(*(each[way] for each in every), strict=True)
        slowest[way] = [max(seconds for seconds, _ in of) for of in rounds]
        row[way] = {"seconds": statistics.median(slowest[way]), "read_mib": runs[0][1] / MIB}
    for other in ("stripe", "dcp"):
        row[f"own_x_{other}"] = ratios(slowest["own"], slowest[other])
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    before = load_average()
    keys = [measure_keys(count, options.repeats) for count in KEYS]
    with tempfile.TemporaryDirectory(prefix="anyrank-edges-") as folder:
        save_file({"weight": torch.rand(WIDTH, WIDTH) + 1}, f"{folder}/model.safetensors")
        warm_files(Path(folder))
        columns = [measure_columns(ranks, folder, options.repeats) for ranks in RANKS]
    result = describe_machine() | {"n": options.repeats, "goal_sec": GOAL_SEC}
    result |= {"mib": WIDTH * WIDTH * 4 // MIB, "keys": keys, "columns": columns}
    result |= {"load_average": [before, load_average()]}
    keep("edges", result)


if __name__ == "__main__":
    main()
