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
from collections.abc import Callable, Iterable
from typing import Any

import bench
import torch
import torch.distributed as dist
from bench import Case, Run, Runs, describe_machine, keep, ratios, read, tell
from launch import Launcher
from tables import RATIOS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import PeakMemory

CONTENDERS = ("ddp stock", "ddp exact", "fsdp stock", "fsdp each", "fsdp exact")
KINDS = ("plain", "ddp", "fsdp", "hsdp", "fsdp bf16")
# Part of the benchmark -> what a row is of. `rounds` is the number of microbatches of a rank.
CASES: dict[str, list[Run]] = {
    # Of the last, 12 microbatches on 3 ranks, ranks send several sums of each gradient.
    "times": [
        {"ranks": size, "rounds": rounds}
        for size, rounds in ((2, 1), (2, 3), (4, 1), (4, 3), (3, 4))
    ],
    "memory": [{"ranks": size, "rounds": rounds} for rounds in (4, 1) for size in (2, 4)],
    # The most ranks first after one: that is where the order of sums differs most.
    "bits": [
        {"kind": kind, "ranks": size}
        for size in (1, 8, 2, 4, 3, 6, 5)
        for kind in KINDS
        if kind != "hsdp" or size in (4, 6, 8)
    ],
}
WIDTH, ROWS = 1024, 256


# -- time and memory of a step --------------------------------------------------------------------


class Ready(torch.utils.data.Dataset[Any]):
    """Microbatches that cost nothing to fetch: sample i is a batch, one of a few."""

    def __init__(self, width: int, rows: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.batches = torch.randn(13, rows, width, generator=g)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.batches[i % 13]


def first(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def mlp(kind: str, width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    net = nn.Sequential(*layers)
    if kind == "ddp":
        return DistributedDataParallel(net)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(net)


class Stepper:
    """The steps of one contender: its model, and the loader that gives it microbatches."""

    def __init__(self, name: str, rounds: int, width: int, rows: int, depth: int) -> None:
        self.data, self.rounds = Ready(width, rows), rounds
        self.net = mlp(name.split()[0], width, depth)
        self.loader: Any = None
        if not name.endswith("each"):
            size, exact = dist.get_world_size(), name.endswith("exact")
            options: dict[str, Any] = {"microbatch": 1, "collate_fn": first, "exact": exact}
            loader = anyrank.ElasticLoader(self.data, global_batch=rounds * size, **options)
            self.loader = iter(loader)

    def prepared(self) -> Callable[[], None]:
        """The next step, its data at hand: forward, backward and exchange."""
        if self.loader is None:  # FSDP2's own reduction, in every microbatch
            return self.reduce_each
        step = next(self.loader)

        def run() -> None:
            for batch in step.microbatches(self.net):
                step.backward(self.net(batch).square().mean())

        return run

    def reduce_each(self) -> None:
        """A step with a reduction in every microbatch."""
        for number in range(self.rounds):
            (self.net(self.data[number]).square().mean() / self.rounds).backward()


def time_steps(rounds: int, width: int, repeats: int) -> Runs:
    """Seconds of each contender's steps, in turn."""
    steppers = {name: Stepper(name, rounds, width, ROWS, 4) for name in CONTENDERS}

    def once(name: str, number: int) -> Run:
        step = steppers[name].prepared()
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds = time.perf_counter() - start
        steppers[name].net.zero_grad()
        return {"seconds": seconds}

    # DDP rebuilds its buckets after the first step.
    runs = Case("steps", CONTENDERS, once).run(repeats, warm=2, is_told=False)
    for stepper in steppers.values():
        if stepper.loader is not None:
            stepper.loader.close()
    return runs


def measure_peak(rounds: int, width: int, name: str) -> float:
    """The peak of a contender's steps, in units of its gradients."""
    stepper = Stepper(name, rounds, width, 8, 12)
    whole = sum(parameter.numel() * 4 for parameter in stepper.net.parameters())
    peaks: list[float] = []
    while len(peaks) < 5:
        step = stepper.prepared()
        dist.barrier()
        with PeakMemory() as memory:
            step()
        stepper.net.zero_grad()
        peaks.append(memory.peak_bytes / whole)
    if stepper.loader is not None:
        stepper.loader.close()
    return statistics.median(peaks[2:])


# -- bits -----------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[Any]):
    """Sample i: nine tokens of an alphabet of 37."""

    def __len__(self) -> int:
        return 393  # 24 steps of 16, and one of 9

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(0, 37, (9,), generator=torch.Generator().manual_seed(i))


def transformer(kind: str) -> nn.Module:
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
    if kind == "hsdp":
        size = dist.get_world_size()
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def train(kind: str, steps: int) -> str:
    """SHA-256 of all weights and Adam state after a number of steps."""
    net = transformer(kind)
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
    return digest_of(net, optimizer)


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer, begin: bytes = b"") -> str:
    """SHA-256 of some bytes, of all weights and of all optimizer state."""
    digest = hashlib.sha256(begin)
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        tensors: list[Any] = [parameter, *(state[name] for name in sorted(state))]
        for tensor in tensors:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- figures --------------------------------------------------------------------------------------


def times_of(launcher: Launcher, case: Run, options: argparse.Namespace) -> Run:
    """Times of a case's steps, and the medians of their ratios."""
    given = (case["rounds"], options.width, options.repeats)
    runs = launcher.values(case["ranks"], time_steps, *given)[0]
    return {
        "n": options.repeats,
        "seconds": {name: quartiles(run["seconds"] for run in runs[name]) for name in runs},
        "ratios": {
            f"{name} / {other}": ratios(runs[name], runs[other], "seconds")["median"]
            for name, other, _ in RATIOS
        },
    }


def quartiles(values: Iterable[float]) -> Run:
    """The middle half of some values."""
    low, median, high = (round(cut, 4) for cut in statistics.quantiles(values, n=4))
    return {"median": median, "quartiles": [low, high]}


def memory_of(launcher: Launcher, case: Run, options: argparse.Namespace) -> Run:
    """The peak of each contender."""
    given = (case["ranks"], measure_peak, case["rounds"], options.width)
    return {name: max(launcher.values(*given, name)) for name in CONTENDERS}


def bits_of(launcher: Launcher, case: Run, options: argparse.Namespace) -> Run:
    """The first half of a run's digest; several, if ranks differ."""
    given = (case["ranks"], train, case["kind"], options.steps)
    digests = {digest[:32] for digest in launcher.values(*given, timeout_sec=1800)}
    return {"sha256": " ".join(sorted(digests))}


def are_alike(rows: list[Run]) -> bool:
    """Whether all runs of the same arithmetic have the same bits."""
    by_arithmetic: dict[bool, set[str]] = {}
    for row in rows:
        by_arithmetic.setdefault("bf16" in row["kind"], set()).add(row["sha256"])
    return all(len(found) == 1 for found in by_arithmetic.values())


def measure(options: argparse.Namespace) -> Run:
    """The part that was asked for; each has a table of its own in the file, which this writes."""
    if options.memory:  # tensors that are freed leave the process
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    part = "bits" if options.bits else "memory" if options.memory else "times"
    one = {"times": times_of, "memory": memory_of, "bits": bits_of}[part]
    shape: Run = {"steps": options.steps} if options.bits else {}
    before = {} if options.quick or part == "times" else read("exact").get(part, {})
    rows: list[Run] = before["rows"] if before and shape.items() <= before.items() else []
    launcher = Launcher("exact")
    for case in CASES[part]:
        is_there = any(case.items() <= row.items() for row in rows)
        if is_there or (options.quick and case["ranks"] > 2):
            continue
        rows.append(case | one(launcher, case, options))
        tell(part, rows[-1])
        if not options.quick:
            table = describe_machine() | shape | {"rows": rows}
            keep("exact", read("exact") | {part: table}, options.out)
    if options.bits:
        print("the same bits" if are_alike(rows) else "DIFFERENT BITS")
    return {}


if __name__ == "__main__":
    small = {"width": 64, "repeats": 3, "steps": 10}
    sizes: Run = {"width": WIDTH, "repeats": 15, "steps": 200}
    bench.main("exact", measure, small, bits=False, memory=False, **sizes)
