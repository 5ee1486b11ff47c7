"""Conversions beside `cp` and `dcp_to_torch_save`: seconds, and the peak of anonymous memory.

    python benchmarks/convert.py --mib 1024 --repeats 5 --out benchmarks/results/convert.json

Each way runs in a process of its own, in turn with the others; each ends with its output on the
disk (fsync). anyrank reads its output again and compares it; cp does not. Files are in the page
cache before. `anon` is RssAnon, the memory of the process itself, sampled every 2 ms, over what it
is once torch and the tool are imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from figures import keep

ROW_BYTES = 64 << 20  # of one matrix
WAYS = ("cp", "safetensors", "cast to bf16", "run", "dcp", "torch from dcp", "dcp_to_torch_save")


def make_sources(folder: Path, mib: int) -> None:
    """The same weights in float32: a file of safetensors, a run, and a DCP folder."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict_saver import save

    import anyrank

    torch.manual_seed(0)
    count = max(1, mib * (1 << 20) // ROW_BYTES)
    rows = ROW_BYTES // 4 // 4096
    tensors = {f"layers.{n}.weight": torch.rand(rows, 4096) for n in range(count)}
    save_file(tensors, folder / "w.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    layers = [torch.nn.Linear(4096, rows, bias=False, device="meta") for _ in range(count)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    model.load_state_dict(tensors, assign=True)
    with anyrank.Checkpoints(folder / "run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()


def prepare(way: str, folder: Path, out: Path) -> Callable[[], object]:
    """What is timed: the conversion, until its bytes are on the disk."""
    source = folder / "w.safetensors"
    if way == "cp":

        def copy() -> None:
            subprocess.run(["cp", source, out], check=True)
            descriptor = os.open(out, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        return copy
    if way == "dcp_to_torch_save":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        def collect() -> None:
            dcp_to_torch_save(folder / "dcp", out)
            descriptor = os.open(out, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        return collect
    from anyrank import convert

    calls: dict[str, Callable[[], object]] = {
        "safetensors": lambda: convert(source, out),
        "cast to bf16": lambda: convert(source, out, dtype="bfloat16"),
        "run": lambda: convert(folder / "run", out),
        "dcp": lambda: convert(source, out, to="dcp"),
        "torch from dcp": lambda: convert(folder / "dcp", out, to="torch"),
    }
    return calls[way]


def anon_bytes() -> int:
    """The process's anonymous memory."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def measure(way: str, folder: Path) -> dict[str, float]:
    """Run one way in this process."""
    warnings.simplefilter("ignore")
    for module in ("torch", "xxhash"):  # in every process, so that they differ in the tool alone
        import_module(module)
    out = folder / "out"
    work = prepare(way, folder, out)
    done = threading.Event()
    before = anon_bytes()
    peak = [before]

    def sample() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anon_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    return {
        "seconds": seconds,
        "anon_mib": (peak[0] - before) / (1 << 20),
        "before_mib": before / (1 << 20),
    }


def run_way(way: str, folder: Path) -> dict[str, float]:
    """Run one way in a process of its own, and remove what it wrote."""
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    out = folder / "out"
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink()
    os.sync()
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversions beside cp.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.folder)))
        return
    from machine import describe_machine

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_sources(folder, options.mib)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way in WAYS:
                rows[way].append(run_way(way, folder))
    report: dict[str, Any] = {**describe_machine(), "mib": options.mib, "repeats": options.repeats}
    report["ways"] = {}
    base = statistics.median(row["seconds"] for row in rows["cp"])
    for way, measured in rows.items():
        seconds = sorted(row["seconds"] for row in measured)
        ratios = sorted(
            cp["seconds"] / row["seconds"] for cp, row in zip(rows["cp"], measured, strict=True)
        )
        report["ways"][way] = {
            "seconds": [round(value, 3) for value in seconds],
            "speed_over_cp": round(statistics.median(ratios), 2),
            "anon_mib": round(max(row["anon_mib"] for row in measured), 1),
            "process_mib": round(max(r["anon_mib"] + r["before_mib"] for r in measured), 1),
        }
        print(f"{way:<20}{report['ways'][way]}  (cp: {base:.2f} s)")
    if options.out:
        keep("convert", report, options.out)


if __name__ == "__main__":
    main()
