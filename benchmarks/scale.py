"""What calls take on 4, 16, 48 and 96 real ranks, beside DCP and the plain FSDP2 step.

    python benchmarks/scale.py  # results/scale.json; needs Linux, unshare and iproute2
    python benchmarks/scale.py --job parts --sizes 1024  # loads alone, on a thousand ranks

Each size runs once, in a network of its own: bytes and packets are those of all ranks together, and
do not depend on what else the machine does. Seconds do: they are a small machine's, whose cores
all ranks share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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


def run_ranks(size: int, job: str, tensors: int) -> list[dict[str, Any]]:
    """The phases of a job on so many ranks."""
    program = [sys.executable, str(bench.HERE / "scale_ranks.py"), str(size)]
    command = [*NAMESPACE, *program, "--job", job, "--tensors", str(tensors)]
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
    rows = [row for size in options.sizes for row in run_ranks(size, options.job, options.tensors)]
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
