"""One rank on one GPU: anyrank against safetensors' and transformers' own ways."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import Launcher, settle

CONTENDERS = ("anyrank", "load_file", "from_pretrained")
MIB = 1 << 20


def load(name: str, folder: str) -> Any:
    """A model of the files on the GPU, in the files' dtype."""
    import torch
    from contenders import Case, build
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from weights import weight_map

    import anyrank

    device = torch.device("cuda", 0)
    if name == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map={"": 0}
        )
    model = build(Case(folder, "bf16", "ddp", 0, 1))
    if name == "anyrank":
        anyrank.load(model, folder)
        return model
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map(folder).values())):
        state |= load_file(Path(folder, file), device="cuda:0")
    model.load_state_dict(state, assign=True)
    return model.to(device)


def run(rank: int, size: int, name: str, folder: str) -> Iterator[dict[str, Any]]:
    """The job of the rank; see `Launcher.run`. The CUDA context is there before the clock
    starts.
    """
    import torch
    from contenders import touch
    from weights import wrong_tensors

    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    loaded = set(sys.modules)
    settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield {}

    start = time.perf_counter()
    model = load(name, folder)
    touch(model)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    yield {
        "usable_sec": seconds,
        "device_bytes": torch.cuda.max_memory_allocated() - before,
        "late": sorted(set(sys.modules) - loaded),
    }

    share = sum(one.numel() * one.element_size() for one in model.parameters())
    yield {"wrong": wrong_tensors(model, folder, torch.bfloat16), "share_bytes": share}


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Every way, in turns; host memory is watched in one more repetition.

    Pinned memory that the driver allocates is not counted as host memory.
    """
    import torch
    from machine import warm_files

    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here")
    warm_files(folder)
    launcher = Launcher("preload")
    runs: list[dict[str, Any]] = []
    for repetition in range(repeats + 1):
        for name in CONTENDERS:
            sample = repetition == repeats
            outcome = launcher.run(1, run, name, str(folder), sample=sample)
            made: dict[str, Any] = {"contender": name, "repetition": repetition}
            if outcome.error:
                made["error"] = outcome.error.strip().splitlines()[-1]
            else:
                made |= outcome.stages[1][0] | outcome.stages[2][0]
                made["host_bytes"] = outcome.peak_bytes - outcome.baseline_bytes if sample else None
            runs.append(made)
            print({key: value for key, value in made.items() if key != "late"}, flush=True)
    rows: list[dict[str, Any]] = []
    for name in CONTENDERS:
        ours = [one for one in runs if one["contender"] == name and "error" not in one]
        if ours:
            times = [one["usable_sec"] for one in ours if one["host_bytes"] is None]
            rows.append(
                {
                    "contender": name,
                    "usable_sec": statistics.median(times),
                    "n": len(times),
                    "device_x": max(one["device_bytes"] / one["share_bytes"] for one in ours),
                    "host_mib": max((one["host_bytes"] or 0) / MIB for one in ours),
                    "wrong": sorted({tensor for one in ours for tensor in one["wrong"]}),
                }
            )
    return {"device": torch.cuda.get_device_name(0), "rows": rows, "runs": runs}
