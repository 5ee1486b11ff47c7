"""What calls take on 4, 16, 48 and 96 real ranks, beside DCP and the plain FSDP2 step.

    python benchmarks/scale.py  # results/scale.json; needs Linux, unshare and iproute2
    python benchmarks/scale.py --job parts --sizes 1024  # loads and steps, on a thousand ranks
    python benchmarks/scale.py --job runs --sizes 1024 7  # saved and resumed by 1,024, then by 7

Each size runs once, in a network of its own: bytes and packets are those of all ranks together, and
do not depend on what else the machine does. Seconds do: they are a small machine's, whose cores
all ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import bench

NAMESPACE = [
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "-",
]


def run_ranks(size: int, job: str, tensors: int, folder: str) -> list[dict[str, Any]]:
    """The phases of a job on so many ranks; all sizes of a job have one folder."""
    program = [sys.executable, str(bench.HERE / "scale_ranks.py"), str(size)]
    options = ["--job", job, "--tensors", str(tensors), "--folder", folder]
    command = [*NAMESPACE, *program, *options]
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line))
                bench.tell(f"{size} ranks", line.strip())
    if process.returncode:
        raise SystemExit(f"{size} ranks failed")
    return lines


def measure(options: argparse.Namespace, _: Any) -> dict[str, Any]:
    """All sizes."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="anyrank-scale-") as folder:
        for size in options.sizes:
            own = folder if options.job == "runs" else f"{folder}/{size}"
            os.makedirs(own, exist_ok=True)
            rows += run_ranks(size, options.job, options.tensors, own)
    return {"job": options.job, "tensors": options.tensors, "rows": rows}


if __name__ == "__main__":
    bench.main(
        "scale",
        measure,
        quick={"sizes": [4], "tensors": 16},
        choices=["job", "sizes"],
        sizes=[4, 16, 48, 96],
        job="beside",
        tensors=128,
    )
