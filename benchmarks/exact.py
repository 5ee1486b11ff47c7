"""The cost of exact=True beside the stock reduction, and its bits on many rank counts.

    python benchmarks/exact.py                # step times, 2 to 4 ranks: DDP and FSDP2
    python benchmarks/exact.py --bits         # SHA-256 after 200 steps on 1 to 8 ranks; goes on
                                              # where an earlier call of as many steps was stopped
    python benchmarks/exact.py --memory       # peak of the gradients, 2 and 4 ranks; goes on too
    python benchmarks/exact.py --quick        # small, nothing is written; with the others too

Times are of forward, backward and exchange of a step of four Linear(1024, 1024) with GELU on 256
rows a microbatch; the contenders take turns, step by step, in the same processes. Bits are of a
small transformer with dropout, AdamW, clipping and a short step at the end of each epoch. Memory is
a rank's anonymous memory within a step above what it is between steps, in units of all gradients in
float32, of twelve Linear(1024, 1024), with few activations.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from figures import keep, read
from launch import Launcher
from live_tables import RATIOS
from machine import describe_machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import PeakMemory

CONTENDERS = ("ddp stock", "ddp exact", "fsdp stock", "fsdp each", "fsdp exact")
# Ranks, and microbatches of each: of the last, 12 on 3, ranks send several sums of each gradient.
CASES = ((2, 1), (2, 3), (4, 1), (4, 3), (3, 4))
KINDS = ("plain", "ddp", "fsdp", "hsdp", "fsdp bf16")
WIDTH, ROWS = 1024, 256


class Ready(torch.utils.data.Dataset[Any]):
    """Microbatches that cost nothing to fetch: sample i is a batch, one of a few."""

    def __init__(self, width: int, rows: int = ROWS) -> None:
        g = torch.Generator().manual_seed(0)
        self.batches = torch.randn(13, rows, width, generator=g)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.batches[i % 13]


def first(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def mlp(kind: str, width: int, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    net = nn.Sequential(*layers)
    if kind == "ddp":
        return DistributedDataParallel(net)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(net)


def time_steps(
    rank: int, size: int, rounds: int, width: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Seconds of each contender's steps."""
    data = Ready(width)
    models = {name: mlp(name.split()[0], width) for name in CONTENDERS}
    loaders = {
        name: iter(
            anyrank.ElasticLoader(
                data,
                global_batch=rounds * size,
                microbatch=1,
                collate_fn=first,
                exact=name.endswith("exact"),
            )
        )
        for name in CONTENDERS
        if not name.endswith("each")
    }
    yield {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(repeats + 2):
        for name in CONTENDERS:
            net = models[name]
            step = next(loaders[name]) if name in loaders else None
            dist.barrier()
            start = time.perf_counter()
            if step is None:  # FSDP2's own reduction, in every microbatch
                for number in range(rounds):
                    (net(data[number]).square().mean() / rounds).backward()
            else:
                for batch in step.microbatches(net):
                    step.backward(net(batch).square().mean())
            dist.barrier()
            if repeat > 1:  # DDP rebuilds its buckets after the first
                seconds[name].append(time.perf_counter() - start)
            net.zero_grad()
    for loader in loaders.values():
        loader.close()
    yield {"seconds": seconds}


def measure_peak(
    rank: int, size: int, rounds: int, width: int, name: str
) -> Iterator[dict[str, Any]]:
    """The peak of a contender's steps, in units of its gradients."""
    data = Ready(width, 8)
    net = mlp(name.split()[0], width, 12)
    loader = anyrank.ElasticLoader(
        data, global_batch=rounds * size, microbatch=1, collate_fn=first, exact="exact" in name
    )
    whole = sum(parameter.numel() * 4 for parameter in net.parameters())
    yield {}
    peaks: list[float] = []
    steps = iter(loader)
    while len(peaks) < 5:
        step = None if name.endswith("each") else next(steps)
        dist.barrier()
        with PeakMemory() as memory:
            if step is None:  # FSDP2's own reduction, in every microbatch
                for number in range(rounds):
                    (net(data[number % 4]).square().mean() / rounds).backward()
            else:
                for batch in step.microbatches(net):
                    step.backward(net(batch).square().mean())
        net.zero_grad()
        peaks.append(memory.peak_bytes / whole)
    steps.close()
    yield {"peak": statistics.median(peaks[2:])}


class Tokens(torch.utils.data.Dataset[Any]):
    """Sample i: nine tokens of an alphabet of 37."""

    def __len__(self) -> int:
        return 393  # 24 steps of 16, and one of 9

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(0, 37, (9,), generator=torch.Generator().manual_seed(i))


def transformer(kind: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(24, 3, 41, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    net = nn.Sequential(nn.Embedding(37, 24), *blocks, nn.Linear(24, 37))
    if kind == "plain":
        return net
    if kind == "ddp":
        return DistributedDataParallel(net)
    options: dict[str, Any] = {}
    if kind == "fsdp bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if kind == "hsdp" and size % 2 == 0 and size > 2:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def train(rank: int, size: int, kind: str, steps: int) -> Iterator[dict[str, Any]]:
    """SHA-256 of all weights and Adam state after a number of steps."""
    yield {}
    net = transformer(kind, size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = anyrank.ElasticLoader(Tokens(), global_batch=16, microbatch=2, exact=True)
    while loader.step < steps:
        for step in loader:
            for batch in step.microbatches(net):
                logits = net(batch)[:, :-1].flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                step.backward(loss, float(batch.sum()))
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            loader.commit()
            if loader.step == steps:
                break
    digest = hashlib.sha256()
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    yield {"sha256": digest.hexdigest()}


def measure_times(launcher: Launcher, quick: bool) -> list[dict[str, Any]]:
    """One row for each number of ranks and of microbatches of a rank."""
    rows: list[dict[str, Any]] = []
    for size, rounds in CASES[:2] if quick else CASES:
        width, repeats = (64, 3) if quick else (WIDTH, 15)
        outcome = launcher.run(size, time_steps, rounds, width, repeats)
        if outcome.error:
            raise RuntimeError(outcome.error)
        seconds: dict[str, list[float]] = outcome.stages[1][0]["seconds"]
        row: dict[str, Any] = {"ranks": size, "rounds": rounds, "n": repeats}
        row["seconds"] = {name: statistics.median(times) for name, times in seconds.items()}
        row["spread"] = {name: quartiles(times) for name, times in seconds.items()}
        row["ratios"] = {
            f"{name} / {other}": statistics.median(
                one / two for one, two in zip(seconds[name], seconds[other], strict=True)
            )
            for name, other, _ in RATIOS
        }
        rows.append(row)
        print(f"{size} ranks, {rounds} microbatches each, medians of {repeats}")
        for name, other, most in RATIOS:
            ratio = row["ratios"][f"{name} / {other}"]
            print(f"  {name} / {other}: {ratio:.2f} (goal: at most {most:.2f})", flush=True)
    return rows


def quartiles(times: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(times, n=4)
    return [low, high]


def measure_memory(launcher: Launcher, quick: bool, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Add one row for each number of ranks and of microbatches of a rank that is not there yet."""
    there = {(row["ranks"], row["rounds"]) for row in rows}
    for rounds in (4, 1):
        for size in (2,) if quick else (2, 4):
            if (size, rounds) in there:
                continue
            row: dict[str, Any] = {"ranks": size, "rounds": rounds}
            for name in CONTENDERS:
                width = 64 if quick else WIDTH
                outcome = launcher.run(size, measure_peak, rounds, width, name, timeout_sec=900)
                if outcome.error:
                    raise RuntimeError(outcome.error)
                row[name] = max(table["peak"] for table in outcome.stages[1])
            rows.append(row)
            print(f"{size} ranks, {rounds} microbatches each, in units of all gradients")
            for name, peak in list(row.items())[2:]:
                print(f"  {name}: {peak:.2f}", flush=True)
            yield


def measure_bits(
    launcher: Launcher, quick: bool, steps: int, rows: list[dict[str, Any]]
) -> Iterator[None]:
    """Add one row for each kind and number of ranks to those that are there already."""
    there = {(row["kind"], row["ranks"]) for row in rows}
    # The most ranks first after one: that is where the order of sums differs most.
    for size in (1, 2) if quick else (1, 8, 2, 4, 3, 6, 5):
        for kind in KINDS:
            if (kind, size) in there or (kind == "hsdp" and size not in (4, 6, 8)):
                continue
            outcome = launcher.run(size, train, kind, steps, timeout_sec=1800)
            if outcome.error:
                raise RuntimeError(outcome.error)
            found = {table["sha256"] for table in outcome.stages[1]}
            rows.append({"kind": kind, "ranks": size, "sha256": " ".join(sorted(found))})
            print(f"{kind:10} {size} ranks: {rows[-1]['sha256'][:16]}", flush=True)
            yield


def verdict(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs of the same arithmetic have the same bits."""
    by_arithmetic: dict[bool, set[str]] = {}
    for row in rows:
        by_arithmetic.setdefault("bf16" in row["kind"], set()).add(row["sha256"])
    return all(len(found) == 1 for found in by_arithmetic.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, and nothing is written")
    parser.add_argument("--bits", action="store_true", help="compare bits, not times")
    parser.add_argument("--steps", type=int, default=200, help="of the runs whose bits compare")
    parser.add_argument("--memory", action="store_true", help="measure peaks, not times")
    options = parser.parse_args()
    if options.memory:  # tensors that are freed leave the process
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    launcher = Launcher("exact")
    steps = min(options.steps, 10) if options.quick else options.steps
    if options.bits:
        before = read("exact").get("bits", {})
        rows = before["rows"] if before.get("steps") == steps and not options.quick else []
        for _ in measure_bits(launcher, options.quick, steps, rows):
            write("bits", {"steps": steps, "rows": rows}, options.quick)
        print("the same bits" if verdict(rows) else "DIFFERENT BITS")
    elif options.memory:
        rows = [] if options.quick else read("exact").get("memory", {}).get("rows", [])
        for _ in measure_memory(launcher, options.quick, rows):
            write("memory", {"rows": rows}, options.quick)
    else:
        write("times", {"rows": measure_times(launcher, options.quick)}, options.quick)


def write(name: str, table: dict[str, Any], quick: bool) -> None:
    """Record a table with what describes the machine."""
    if not quick:
        keep("exact", read("exact") | {name: describe_machine() | table})


if __name__ == "__main__":
    main()
