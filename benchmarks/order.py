"""Samples that are repeated or lost when a run goes on on another number of ranks.

    python benchmarks/order.py

960 samples, 4 a rank and step, 10 steps on N ranks, then on M ranks to the end of the epoch. Exact:
no clock is involved. Also which ranks draw the same random numbers afterwards.
"""

from __future__ import annotations

import collections
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

import anyrank
from anyrank.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "order.json"
SAMPLES, BATCH, STEPS = 960, 4, 10
CASES = ((3, 2), (2, 3), (4, 1), (3, 3))


def by_sampler(size: int, skip: int, steps: int | None) -> list[int]:
    """DistributedSampler, with the batches before `skip` skipped: what most tools do."""
    seen: list[int] = []
    for rank in range(size):
        sampler = DistributedSampler(range(SAMPLES), size, rank, seed=0)  # type: ignore[arg-type]
        batches = list(BatchSampler(sampler, BATCH, drop_last=False))
        for batch in batches[skip:][:steps]:
            seen += batch
    return seen


def train(path: str, steps: int | None) -> tuple[list[int], float]:
    """One rank of a run with anyrank; what it took, and a number that it draws afterwards."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # each its own stream
    model = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(range(SAMPLES), global_batch=12, microbatch=1)
    state = anyrank.TrainState(model, data=loader)
    seen: list[int] = []
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(epochs=1) if steps is None else ckpts.steps(until=steps):
            for batch in step.microbatches(model):
                if not step._run.slot.is_copy:
                    seen += batch.tolist()
    return seen, torch.rand(()).item()


def counted(seen: list[int]) -> dict[str, int]:
    """Samples seen more than once, and never."""
    count = collections.Counter(seen)
    again = sum(number - 1 for number in count.values())
    return {"repeated": again, "lost": SAMPLES - len(count)}


def main() -> None:
    """Count, print, and keep the results."""
    rows: list[dict[str, Any]] = []
    for first, then in CASES:
        peers = counted(by_sampler(first, 0, STEPS) + by_sampler(then, STEPS, None))
        with tempfile.TemporaryDirectory() as path:
            before = run_ranks(first, train, path, STEPS)
            after = run_ranks(then, train, path, None)
        ours = counted([one for seen, _ in (*before, *after) for one in seen])
        alike = then - len({number for _, number in after})
        rows.append(
            {"from": first, "to": then, "sampler": peers, "anyrank": ours | {"alike": alike}}
        )
        print(json.dumps(rows[-1]), flush=True)
    result = describe_machine() | {"samples": SAMPLES, "batch": BATCH, "steps": STEPS}
    RESULTS.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
