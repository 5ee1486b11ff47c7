"""What a save and a resume ask of a file system, and of an object store, counted for each rank.

    python benchmarks/storage_calls.py  # results/storage_calls.json; needs Linux, strace and moto

System calls that name a file, list a folder or wait for a disk are counted by strace; reads and
writes of a file's bytes are not. Requests are those of the S3 client to a server in this process.
Counts do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import bench

TRACE = "strace -f -q -s 300 -e trace=%file,fsync,fdatasync,getdents64 -o {folder}/trace.$RANK"
OF_DISK = ("fsync", "fdatasync", "getdents64")
MARK = re.compile(r'"/counted/(begin|end)-([^"]*)"')


def train(url: str, folder: str) -> None:
    """One rank: four saves, of which the newest two stay, and a resume."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import anyrank

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count_requests(f"{folder}/requests.{dist.get_rank()}")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = anyrank.TrainState(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with anyrank.Checkpoints(url, state, every=10**9, keep=2) as ckpts:
        ckpts.resume()
        for number in range(4):
            step()
            state.step += 1
            mark(f"save {number}")
            ckpts.save()
            mark(f"save {number}", "end")
    mark("resume")
    with anyrank.Checkpoints(url, state, every=10**9) as ckpts:
        assert ckpts.resume() is not None
    mark("resume", "end")
    dist.destroy_process_group()


def mark(name: str, end: str = "begin") -> None:
    """Say in the trace where this rank is, between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    REQUESTS.append(f"{end}-{name}")
    os.path.exists(f"/counted/{end}-{name}")
    dist.barrier()


REQUESTS: list[str] = []  # of this rank: marks, and the names of requests


def count_requests(path: str) -> None:
    """Write this rank's requests into a file when it ends."""
    import atexit

    from aiobotocore.endpoint import AioEndpoint

    make_request: Any = AioEndpoint.make_request

    async def counted(self: Any, operation: Any, request: Any) -> Any:
        REQUESTS.append(operation.name)
        return await make_request(self, operation, request)

    AioEndpoint.make_request = counted
    atexit.register(lambda: Path(path).write_text(json.dumps(REQUESTS), encoding="utf-8"))


def launch(size: int, url: str, folder: str, prefix: str) -> None:
    """Run the ranks."""
    program = f"{prefix} {sys.executable} {Path(__file__)} --rank {url} {folder}"
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone"]
    command += ["--nproc-per-node", str(size), "bash", "-c", program]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def calls_in(path: Path, run: str) -> dict[str, Counter[str]]:
    """Phase -> the system calls of a rank on its run's folder."""
    phase, found = "", dict[str, Counter[str]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if marked := MARK.search(line):
            phase = marked[2] if marked[1] == "begin" else ""
            continue
        call = re.match(r"\d+ +(\w+)\(", line)
        if phase and call and (run in line or call[1] in OF_DISK):
            found.setdefault(phase, Counter())[call[1]] += 1
    return found


def requests_in(path: Path) -> dict[str, Counter[str]]:
    """Phase -> the requests of a rank."""
    phase, found = "", dict[str, Counter[str]]()
    for entry in json.loads(path.read_text(encoding="utf-8")):
        kind, _, name = entry.partition("-")
        if kind in ("begin", "end"):
            phase = name if kind == "begin" else ""
        elif phase:
            found.setdefault(phase, Counter())[entry] += 1
    return found


def measure(options: argparse.Namespace, _: Any) -> dict[str, Any]:
    """All sizes, in a folder and in an object store."""
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for place in ("folder", "object store"):
            with tempfile.TemporaryDirectory(prefix="anyrank-calls-") as folder:
                if place == "folder":
                    launch(size, f"{folder}/run", folder, TRACE.format(folder=folder))
                    ranks = {
                        n: calls_in(Path(f"{folder}/trace.{n}"), "/run") for n in (0, size - 1)
                    }
                else:
                    in_object_store(size, folder)
                    ranks = {n: requests_in(Path(f"{folder}/requests.{n}")) for n in (0, size - 1)}
            for rank, found in ranks.items():
                for phase in ("save 0", "save 3", "resume"):
                    calls = found.get(phase, Counter[str]())
                    row = {"place": place, "ranks": size, "rank": rank, "phase": phase}
                    rows.append(
                        row | {"calls": calls.total(), "by_name": dict(sorted(calls.items()))}
                    )
                    bench.tell(f"{place}, {size} ranks, rank {rank}, {phase}", dict(calls))
    return {"rows": rows}


def in_object_store(size: int, folder: str) -> None:
    """Run the ranks beside an S3 server."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    boto3.client("s3").create_bucket(Bucket=f"calls-{size}")
    launch(size, f"s3://calls-{size}/run", folder, "")
    server.stop()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        train(*sys.argv[2:])
    else:
        bench.main(
            "storage_calls", measure, quick={"sizes": [2]}, choices=["sizes"], sizes=[2, 4, 8]
        )
