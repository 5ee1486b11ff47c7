"""The benchmarks of loads, saves, syncs, exact sums and memory, on the GPUs of this machine.

    python benchmarks/gpu.py                 # one rank on each GPU, NCCL; results/gpu.json
    python benchmarks/gpu.py --cases load    # those that begin with it, and nothing is written
    python benchmarks/gpu.py --quick         # small, nothing is written
    python benchmarks/gpu.py --sim           # small, on the device that the tests simulate

The cases are those of `load.py`, `save.py`, `sync.py`, `exact.py` and `memory.py`, with the same
contenders where these take a device. Clocks wait for the device; memory is the device's own peak.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench
import exact
import load
import memory
import save
import sync
import torch
from bench import HERE, Run, tell
from launch import Launcher
from torch.cuda import nccl

NO_GPU = "torch sees no CUDA device here, so nothing is measured"
DRIVER = Path("/proc/driver/nvidia/version")
Measure = Callable[[argparse.Namespace, Launcher], Any]


def cases_of(size: int) -> dict[str, tuple[Measure, Run, Run]]:
    """On so many ranks: what measures a case, its options, and those that --quick changes."""
    steps = [{"ranks": size, "rounds": rounds} for rounds in (1, 4)]
    same = [{"kind": "plain", "ranks": 1}]
    same += [{"kind": kind, "ranks": size} for kind in ("ddp", "fsdp", "fsdp bf16")]
    sizes: Run = {"width": 4096, "repeats": 15, "steps": 200}
    small: Run = {"width": 64, "repeats": 3, "steps": 3}
    return {
        "load": (
            load.measure,
            {
                "ranks": [size],
                "dtype": ["bf16", "fp32"],
                "layout": ["fsdp", "ddp"],
                "contenders": ["hand", "anyrank", "dcp", "rank0", "load_file", "ddp_sends"],
                "repeats": 5,
                "memory_repeats": 1,
                "gib": 5.0,
                "model": None,
            },
            {"dtype": ["bf16"], "repeats": 1, "gib": 0.05},
        ),
        "save": (
            save.measure,
            {
                "ranks": size,
                "loads": sorted({size, max(1, size // 2)}),
                "ways": ["hand", "rank0", "dcp", "dcp_async", "anyrank", "anyrank_background"],
                "layers": 84,
                "repeats": 5,
            },
            {"layers": 2, "repeats": 1},
        ),
        "sync": (
            sync.measure,
            {"mib": [256, 2048], "ranks": size, "repeats": 5},
            {"mib": [8], "repeats": 1},
        ),
        "exact times": (partial(exact.rows_of, "times", steps), sizes, small),
        "exact memory": (partial(exact.rows_of, "memory", steps), sizes, small),
        "exact bits": (partial(exact.rows_of, "bits", same), sizes, small),
        "memory": (memory.timed_tables, {"repeats": 15, "shrink": 1}, {"repeats": 1, "shrink": 16}),
    }


def describe_devices(kind: str, size: int) -> Run:
    """Which they are, and what drives them."""
    if kind == "sim":
        return {"devices": f"{size} simulated"}
    names = {torch.cuda.get_device_name(number) for number in range(size)}
    driver = DRIVER.read_text(encoding="ascii").splitlines()[0] if DRIVER.exists() else "unknown"
    found: Run = {"devices": f"{size} of {', '.join(sorted(names))}", "driver": driver}
    return found | {"cuda": torch.version.cuda, "nccl": nccl.version()}


def main() -> int:
    """The command; ends with 2 where there is no device."""
    defaults: Run = {"sim": False, "cases": [""]}
    options = bench.parse(defaults, None)
    kind, is_quick = ("sim", True) if options.sim else ("cuda", options.quick)
    if options.sim:
        sys.path[:0] = [str(HERE.parent)]  # where the tests are
        from tests.device.build_sim import build

        build()
    elif not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    size = int(os.environ.get("SIM_DEVICES", "2")) if options.sim else torch.cuda.device_count()
    result = bench.describe_machine() | describe_devices(kind, size)
    tell("devices", result)
    launcher = Launcher("gpu", kind)
    for name, (measure, given, small) in cases_of(size).items():
        if name.startswith(tuple(options.cases)):
            start = time.monotonic()
            chosen = argparse.Namespace(**(given | (small if is_quick else {})))
            result[name] = measure(chosen, launcher)
            tell(f"seconds of {name}", round(time.monotonic() - start, 1))
    if options.out or not (is_quick or options.cases != [""]):
        bench.keep("gpu", result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
