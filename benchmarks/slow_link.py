"""Storage behind a slow link that all ranks share: `strategy="own"` against `"stripe"`.

    python benchmarks/slow_link.py               # a minute; results/slow_link.json
    python benchmarks/slow_link.py --mb-per-sec 200 --repeats 3

Replicas of a model (DDP, 64 MiB of float32) on 2 and on 4 ranks, which want the same bytes. Files
are local ones behind a file system of this benchmark (`shared-link://`, known to fsspec), where a
read of n bytes returns no sooner than a link of the given rate has carried them, after all that any
rank asked for before: one link for all, as of a machine with one network card. The exchange between
ranks goes over the loopback and is not slowed down. Strategies take turns.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import fsspec
import torch.distributed as dist
from figures import keep, ratios
from fsspec.implementations.local import LocalFileSystem
from machine import describe_machine, load_average
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

MIB = 1 << 20
LAYERS, WIDTH = 16, 1024  # of 4 MiB
RANKS = (2, 4)
STRATEGIES: tuple[Literal["own", "stripe"], ...] = ("own", "stripe")
LIMIT_SEC = 300.0
CLOCK = "link.clock"  # beside the weights: when the link is free again, in seconds since the boot


class SharedLink(LocalFileSystem):
    """Local files, read through a link of so many bytes a second."""

    protocol = "shared-link"
    rate = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("shared-link://")))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        """A range of a file, once the link has carried it."""
        inner = self._strip_protocol(path)
        data: Any = super().cat_file(inner, start=start, end=end, **options)
        carried = self._carry(Path(inner).with_name(CLOCK), len(data))
        time.sleep(max(0.0, carried - time.monotonic()))
        return bytes(data)

    def _carry(self, clock: Path, nbytes: int) -> float:
        """When the link will have carried so many bytes more, for any of the processes."""
        with clock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (free,) = struct.unpack("<d", file.read(8))
            carried = max(free, time.monotonic()) + nbytes / self.rate
            file.seek(0)
            file.write(struct.pack("<d", carried))
        return float(carried)


def build() -> nn.Sequential:
    """64 MiB of float32."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def job(folder: str, rate: float, repeats: int) -> dict[str, list[tuple[float, int]]]:
    """Seconds of each load, and bytes that all ranks read."""
    SharedLink.rate = rate
    fsspec.register_implementation("shared-link", SharedLink, clobber=True)
    model = DistributedDataParallel(build())
    took: dict[str, list[tuple[float, int]]] = {strategy: [] for strategy in STRATEGIES}
    for number in range(repeats):
        for strategy in STRATEGIES[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            path = f"shared-link://{folder}/model.safetensors"
            report = anyrank.load(model, path, strategy=strategy)
            took[strategy].append((time.perf_counter() - start, sum(report.bytes_read)))
    return took


def measure(ranks: int, rate: float, repeats: int) -> dict[str, Any]:
    """One row: what both strategies take, and the ratios of the same repetition."""
    with tempfile.TemporaryDirectory(prefix="anyrank-link-") as folder:
        Path(folder, CLOCK).write_bytes(struct.pack("<d", 0.0))
        save_file(build().state_dict(), f"{folder}/model.safetensors")
        every = run_ranks(ranks, job, folder, rate, repeats, timeout=LIMIT_SEC)
    row: dict[str, Any] = {"ranks": ranks}
    slowest: dict[str, list[float]] = {}
    for strategy in STRATEGIES:
        rounds = zip(*(each[strategy] for each in every), strict=True)
        slowest[strategy] = [max(seconds for seconds, _ in of) for of in rounds]
        row[strategy] = {
            "seconds": statistics.median(slowest[strategy]),
            "read_mib": every[0][strategy][0][1] / MIB,
        }
    row["ratio"] = ratios(slowest["stripe"], slowest["own"])
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb-per-sec", type=float, default=50.0, help="of the link")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    before = load_average()
    rows = [measure(ranks, options.mb_per_sec * 1e6, options.repeats) for ranks in RANKS]
    result = describe_machine() | {"mb_per_sec": options.mb_per_sec, "n": options.repeats}
    result |= {"mib": LAYERS * WIDTH * WIDTH * 4 // MIB, "rows": rows}
    result |= {"load_average": [before, load_average()]}
    keep("slow_link", result)


if __name__ == "__main__":
    main()
