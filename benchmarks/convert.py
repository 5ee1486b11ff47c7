"""Conversions beside `cp` and `dcp_to_torch_save`: seconds, and the peak of anonymous memory.

    python benchmarks/convert.py --mib 1024 --repeats 5
    python benchmarks/convert.py --quick         # 64 MiB once, nothing is written

Each way runs in a fresh process, in turn with the others; each ends with its output on the disk
(fsync). Files are in the page cache before. `anon` is RssAnon, the memory of the process itself,
sampled every 2 ms, over what it is once torch and the tools are imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import bench
import torch
import xxhash  # noqa: F401 - in every process, so that they differ in the tool alone
from bench import MIB, Case, Run, spread, tell
from launch import Launcher, settle, timed
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from anyrank import Checkpoints, TrainState, convert
from anyrank.testing import rss_anon

MATRIX_MIB = 64
WIDTH = 4096


def make_sources(folder: Path, mib: int) -> None:
    """The same weights in float32: a file of safetensors, a run, and a DCP folder."""
    torch.manual_seed(0)
    count, rows = max(1, mib // MATRIX_MIB), MATRIX_MIB * MIB // 4 // WIDTH
    tensors = {f"layers.{n}.weight": torch.rand(rows, WIDTH) for n in range(count)}
    save_file(tensors, folder / "w.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    layers = [torch.nn.Linear(WIDTH, rows, bias=False, device="meta") for _ in range(count)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    model.load_state_dict(tensors, assign=True)
    with Checkpoints(folder / "run", TrainState(model)) as ckpts:
        ckpts.save()


def synced(work: Callable[[Path, Path], object], name: str) -> Callable[[Path, Path], None]:
    """A tool that does not sync its output, on the file of that name."""

    def run(folder: Path, out: Path) -> None:
        work(folder / name, out)
        descriptor = os.open(out, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    return run


SOURCE = "w.safetensors"
# From the folder of the sources and the path of the output.
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "cp": synced(lambda source, out: subprocess.run(["cp", source, out], check=True), SOURCE),
    "safetensors": lambda folder, out: convert(folder / SOURCE, out),
    "cast to bf16": lambda folder, out: convert(folder / SOURCE, out, dtype="bfloat16"),
    "run": lambda folder, out: convert(folder / "run", out),
    "dcp": lambda folder, out: convert(folder / SOURCE, out, to="dcp"),
    "torch from dcp": lambda folder, out: convert(folder / "dcp", out, to="torch"),
    "dcp_to_torch_save": synced(dcp_to_torch_save, "dcp"),
}


def run_way(way: str, folder: Path, out: Path) -> Run:
    """Run one way in this process."""
    warnings.simplefilter("ignore")
    settle()
    before = rss_anon()
    table = timed(lambda: WAYS[way](folder, out), watch_host=True)
    anon = table["host_bytes"] / MIB
    return {"seconds": table["seconds"], "anon_mib": anon, "process_mib": anon + before / MIB}


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """All ways in turn."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, out = Path(name), Path(name, "out")
        make_sources(folder, options.mib)

        def once(way: str, number: int) -> Run:
            (found,) = launcher.values(1, run_way, way, folder, out)
            shutil.rmtree(out) if out.is_dir() else out.unlink()
            os.sync()
            return found

        runs = Case("convert", WAYS, once).run(options.repeats)
    ways: dict[str, Run] = {}
    for way, of in runs.items():
        speeds = [cp["seconds"] / run["seconds"] for cp, run in zip(runs["cp"], of, strict=True)]
        ways[way] = {
            "seconds": sorted(round(run["seconds"], 3) for run in of),
            "speed_over_cp": round(spread(speeds)["median"], 2),
            "anon_mib": round(max(run["anon_mib"] for run in of), 1),
            "process_mib": round(max(run["process_mib"] for run in of), 1),
        }
        tell(way, ways[way])
    return {"mib": options.mib, "repeats": options.repeats, "ways": ways}


if __name__ == "__main__":
    small = {"mib": 64, "repeats": 1}
    bench.main("convert", measure, small, mib=1024, repeats=5, folder=None)
