"""The cost of exact=True beside the stock reduction, and its bits on many rank counts.

    python benchmarks/exact.py                # step times, 2 to 4 ranks: DDP and FSDP2
    python benchmarks/exact.py --bits         # SHA-256 after 200 steps on 1 to 8 ranks
    python benchmarks/exact.py --memory       # peak of the gradients, 2 and 4 ranks
    python benchmarks/exact.py --quick        # small, nothing is written; with the others too

Each goes on where an earlier call was stopped.

Times are of forward, backward and exchange of a step of four Linear(1024, 1024) with GELU on 256
rows a microbatch; the contenders take turns, step by step, in the same processes. Bits are of a
small transformer with dropout, AdamW, clipping and a short step at the end of each epoch. Memory is
a rank's own within a step above what it is between steps, in units of all gradients in float32, of
twelve Linear(1024, 1024), with few activations; on a CPU it is anonymous memory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import bench
import torch
import torch.distributed as dist
from bench import Case, Run, Runs, median, ratios, slowest, spread
from launch import Launcher, device, timed
from models import digest_of, wrapped
from tables import RATIOS
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import anyrank

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
        self.batches = torch.randn(13, rows, width, generator=g).to(device())

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.batches[i % 13]


def first(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def fix_order(is_exact: bool) -> None:
    """On a device exact=True asks for kernels that add in one order; others are as they are."""
    if device().type != "cpu":
        torch.use_deterministic_algorithms(is_exact)


class Stepper:
    """The steps of one contender: its model, and the loader that gives it microbatches."""

    def __init__(self, name: str, rounds: int, width: int, rows: int, depth: int) -> None:
        self.data, self.rounds, self.is_exact = Ready(width, rows), rounds, name.endswith("exact")
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.net = wrapped(name.split()[0], nn.Sequential(*layers).to(device()), layers)
        self.loader: Any = None
        if not name.endswith("each"):
            options: dict[str, Any] = {"microbatch": 1, "collate_fn": first}
            size = rounds * dist.get_world_size()
            self.loader = iter(
                anyrank.ElasticLoader(self.data, global_batch=size, exact=self.is_exact, **options)
            )

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

    def timed(self, watch_host: bool = False) -> Run:
        """The next step, as `launch.timed` has it."""
        fix_order(self.is_exact)
        table = timed(self.prepared(), watch_host)
        self.net.zero_grad()
        return table

    def close(self) -> None:
        """End the loader."""
        if self.loader is not None:
            self.loader.close()


def time_steps(rounds: int, width: int, repeats: int) -> Runs:
    """Seconds of each contender's steps, in turn."""
    steppers = {name: Stepper(name, rounds, width, ROWS, 4) for name in CONTENDERS}
    # DDP rebuilds its buckets after the first step.
    case = Case("steps", CONTENDERS, lambda name, _: steppers[name].timed())
    runs = case.run(repeats, warm=2, is_told=False)
    for stepper in steppers.values():
        stepper.close()
    return runs


def measure_peak(rounds: int, width: int, name: str) -> float:
    """The peak of a contender's steps, in units of its gradients."""
    with closing(Stepper(name, rounds, width, 8, 12)) as stepper:
        whole = sum(parameter.numel() * 4 for parameter in stepper.net.parameters())
        case = Case(name, [name], lambda *_: stepper.timed(watch_host=True))
        return median(case.run(3, warm=2, is_told=False)[name], "peak_bytes") / whole


# -- bits -----------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[Any]):
    """Sample i: nine tokens of an alphabet of 37."""

    def __len__(self) -> int:
        return 393  # 24 steps of 16, and one of 9

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(0, 37, (9,), generator=torch.Generator().manual_seed(i))


def transformer(kind: str) -> nn.Module:
    """Two blocks, wrapped as one of KINDS."""
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(24, 3, 41, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    net = nn.Sequential(nn.Embedding(37, 24), *blocks, nn.Linear(24, 37)).to(device())
    wrapper, *low = kind.split()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return wrapped(wrapper, net, blocks, **({"mp_policy": policy} if low else {}))


def train(kind: str, steps: int) -> str:
    """SHA-256 of all weights and Adam state after a number of steps."""
    fix_order(True)
    net = transformer(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = anyrank.ElasticLoader(Tokens(), global_batch=16, microbatch=2, exact=True)
    while loader.step < steps:
        for step in loader:
            for tokens in step.microbatches(net):
                batch = tokens.to(device())
                logits = net(batch)[:, :-1].flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                step.backward(loss, float(tokens.sum()))
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            loader.commit()
            if loader.step == steps:
                break
    return digest_of(net, optimizer)


# -- figures --------------------------------------------------------------------------------------


def times_of(launcher: Launcher, case: Run, options: argparse.Namespace) -> Run:
    """Times of a case's steps, and the medians of their ratios."""
    given = (case["rounds"], options.width, options.repeats)
    runs = slowest(launcher.values(case["ranks"], time_steps, *given))
    return {
        "n": options.repeats,
        "seconds": {name: spread(run["seconds"] for run in runs[name]) for name in runs},
        "ratios": {
            f"{name} / {other}": ratios(runs[name], runs[other], "seconds")["median"]
            for name, other, _ in RATIOS
        },
    }


def memory_of(launcher: Launcher, case: Run, options: argparse.Namespace) -> Run:
    """The peak of each contender."""

    def peak(name: str, _: int) -> Run:
        given = (measure_peak, case["rounds"], options.width, name)
        return {"peak": max(launcher.values(case["ranks"], *given))}

    return {name: run["peak"] for name, run in Case("memory", CONTENDERS, peak).once().items()}


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


def rows_of(
    part: str, cases: list[Run], options: argparse.Namespace, launcher: Launcher
) -> list[Run]:
    """The rows of a part."""
    one = {"times": times_of, "memory": memory_of, "bits": bits_of}[part]
    sizes = f"{launcher.kind}, width {options.width}, {options.steps} steps"
    by_key = {f"{part}, {', '.join(map(str, case.values()))}, {sizes}": case for case in cases}
    found = bench.go_on("exact", by_key, lambda key: one(launcher, by_key[key], options))
    return [case | found[key] for key, case in by_key.items()]


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """The part that was asked for; each has a table of its own in the file."""
    if options.memory:  # tensors that are freed leave the process
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    part = "bits" if options.bits else "memory" if options.memory else "times"
    cases = [case for case in CASES[part] if case["ranks"] <= options.most_ranks]
    table: Run = {"rows": rows_of(part, cases, options, launcher)}
    if options.bits:
        print("the same bits" if are_alike(table["rows"]) else "DIFFERENT BITS")
        table = {"steps": options.steps} | table
    return {part: table}


if __name__ == "__main__":
    small = {"width": 64, "repeats": 3, "steps": 10, "most_ranks": 2}
    sizes: Run = {"width": WIDTH, "repeats": 15, "steps": 200, "most_ranks": 8}
    bench.main("exact", measure, small, (), True, bits=False, memory=False, **sizes)
