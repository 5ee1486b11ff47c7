"""Runs with exact=True that are killed again and again, at random, and end with the same bits.

    python benchmarks/soak.py                # 200 kills, about 20 minutes; results/soak.json
    python benchmarks/soak.py --kills 10
    python benchmarks/soak.py --ranks 17 20 --kills 40  # a tree of two levels

A run of two epochs lives on: each of its lives has 1 to 4 ranks, no wrapper, DDP or FSDP2, a worker
a rank or none, saves in the background or not, and ends by SIGKILL of one rank or of all, at a
random passage of a random event: a microbatch, a part of a save, an operation on a file. Runs
follow each other until there were enough kills. Each must end with the SHA-256 of weights,
optimizer state and learning rate that a run on one rank has, which nothing disturbed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import bench
import torch
from bench import Run, tell
from launch import Launcher
from models import digest_of, wrapped
from torch import nn

import anyrank
from anyrank import faults
from anyrank.testing import Fault, FaultNotReached, RankPool, RanksFailed

STEPS = 12  # of two epochs, each with a short last step
GRACE_SEC = 2.0  # for the survivors, which may wait for a dead rank in a collective of FSDP2
MOST_PASSAGES = 30  # of an event, within a life
FILES = ["file.folder", "file.open", "file.write", "file.fsync", "file.rename", "file.remove"]
UNEXPECTED = (anyrank.CorruptCheckpoint, ChildProcessError)  # of a survivor
EVENTS = ["soak.microbatch", "save.stage", "save.write", "save.commit", *FILES]


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i, augmented at random."""

    def __len__(self) -> int:
        return 57

    def __getitem__(self, i: int) -> torch.Tensor:
        rows = torch.randn(5, generator=torch.Generator().manual_seed(i))
        return rows * (1 + 0.1 * torch.rand(()))


def live(folder: str, batch: int, kind: str, workers: int, background: bool) -> str:
    """Go on with the run to its end, unless a kill comes before; returns the digest."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(5, 13), nn.GELU(), nn.Dropout(0.1), nn.Linear(13, 3))
    net = wrapped(kind, net, net[:1])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sizes: dict[str, Any] = {"global_batch": batch, "microbatch": 2, "num_workers": workers}
    loader = anyrank.ElasticLoader(Samples(), **sizes, seed=3, exact=True)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler, data=loader)
    with anyrank.Checkpoints(folder, state, every=1, background=background) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=STEPS):
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean(), float(batch.abs().sum()))
                faults.point("soak.microbatch")
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return digest_of(net, optimizer, repr(scheduler.get_last_lr()).encode())


def batch_for(sizes: list[int]) -> int:
    """The global batch, of which the most ranks get a microbatch each."""
    return max(10, 2 * max(sizes))


def draw_life(draw: random.Random, sizes: list[int]) -> tuple[int, str, int, bool, list[Fault]]:
    """Ranks, wrapper, workers of a rank, whether saves are in the background, and the kills."""
    size = draw.randint(*sizes)
    kind = "plain" if size == 1 else draw.choice(["ddp", "fsdp"])
    event, nth = draw.choice(EVENTS), draw.randint(1, MOST_PASSAGES)
    victims = [*range(size)] if draw.random() < 0.5 else [draw.randrange(size)]
    kills = [Fault(one, event, "kill", nth) for one in victims]
    return size, kind, draw.randint(0, 1), draw.random() < 0.5, kills


def end_run(
    pool: RankPool, folder: Path, draw: random.Random, sizes: list[int]
) -> tuple[set[str], list[Run]]:
    """A run to its end: the ranks' digests there, and its lives that were killed."""
    killed: list[Run] = []
    while True:
        size, *options, kills = draw_life(draw, sizes)
        names = ("kind", "workers", "background")
        life = {"ranks": size, **dict(zip(names, options, strict=True)), "of": len(kills)}
        try:
            pool.run(
                size, live, str(folder), batch_for(sizes), *options, faults=kills, grace=GRACE_SEC
            )
        except FaultNotReached as whole:  # the life ended before its kills
            return {*whole.results}, killed
        except RanksFailed as failure:  # the survivors of a killed rank raise, each its own error
            errors = failure.errors.values()
            if len(errors) == size or any(isinstance(one, UNEXPECTED) for one in errors):
                raise
        life |= {"event": kills[0].point, "passage": kills[0].nth}
        tell("killed", life)
        killed.append(life)


def measure(options: argparse.Namespace, _: Launcher) -> Run:
    """Kills until there are enough, and the runs that ended with other bits."""
    draw = random.Random(options.seed)
    with RankPool(max(options.ranks)) as pool, tempfile.TemporaryDirectory() as root:
        whole = str(Path(root, "whole"))
        expected = pool.run(1, live, whole, batch_for(options.ranks), "plain", 0, False)[0]
        runs, wrong, killed = 0, 0, list[Run]()
        while len(killed) < options.kills:
            digests, lives = end_run(pool, Path(root, str(runs)), draw, options.ranks)
            runs, killed = runs + 1, killed + lives
            wrong += digests != {expected}
            tell("a run ended", {"kills": len(lives), "same bits": digests == {expected}})
    by_event = {event: sum(one["event"] == event for one in killed) for event in EVENTS}
    goals = [bench.goal("runs that ended with other bits", wrong, 0)]
    return {"kills": len(killed), "runs": runs, "wrong": wrong, "events": by_event, "goals": goals}


if __name__ == "__main__":
    import soak  # the ranks import its jobs by this name

    bench.main("soak", soak.measure, choices=["ranks"], kills=200, seed=0, ranks=[1, 4])
