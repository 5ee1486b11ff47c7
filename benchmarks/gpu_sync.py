"""A sync between two processes on GPUs beside `torch.distributed.broadcast`, in turns.

    python benchmarks/gpu_sync.py            # 1,024 MiB, 5 repeats
    python benchmarks/gpu_sync.py --mib 64

Two processes: each on a GPU of its own, over NCCL, where there are two; else both on the one, over
gloo, as NCCL takes no device twice. Never run on CUDA so far: no GPU was there when it was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks

LAYERS = 16
MIB = 1 << 20


def job(mib: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way on this rank, from rank 0's model into rank 1's."""
    rank, many = dist.get_rank(), torch.cuda.device_count() > 1
    device = torch.device("cuda", rank if many else 0)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl" if many else "gloo")
    width = int((mib * MIB / 4 / LAYERS) ** 0.5)
    layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(1.0 + rank)

    def broadcast() -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter, 0, group=group)

    def sync() -> None:
        anyrank.sync(model if rank else None, None if rank else model)

    seconds: dict[str, list[float]] = {"anyrank.sync": [], "broadcast": []}
    ways = {"anyrank.sync": sync, "broadcast": broadcast}
    for _ in range(repeats + 1):  # the first one connects
        for name, way in ways.items():
            if rank:
                for parameter in model.parameters():
                    parameter.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            way()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            if any(bool((parameter != 1).any()) for parameter in model.parameters()):
                raise SystemExit(f"{name}: rank {rank} holds other values than rank 0 gave")
    return {name: each[1:] for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here")
    made = run_ranks(2, job, options.mib, options.repeats, timeout=600)
    rows: list[dict[str, Any]] = []
    for name in made[0]:
        slowest = [max(each) for each in zip(*(times[name] for times in made), strict=True)]
        median = statistics.median(slowest)
        rows.append({"way": name, "seconds": slowest, "mib_per_second": options.mib / median})
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    print(json.dumps({"devices": devices, "mib": options.mib, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
