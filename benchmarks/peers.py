"""A killed rank: how long until the run goes on?

    python benchmarks/peers.py                # results/peers.json
    python benchmarks/peers.py --quick        # once with small weights, nothing is written

FSDP2 with AdamW trains on 4 CPU ranks; rank 1 gets a SIGKILL in a step in the middle between two
saves. The same script three ways, in turn:

  torchrun  it is started again when it has ended, and the ranks resume from files
  files     `anyrank run --then 4`, from files
  memory    the same, from a snapshot in memory after each step (`peers=True`)

Counted on rank 0 of the second attempt, in seconds:

  to_step   from the SIGKILL to the end of the next optimizer step
  to_new    from the SIGKILL to the end of the step that was killed: the others are done again
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench
from bench import MIB, Case, Run, ratios, tell
from launch import ENVIRON, Launcher, torchrun

RANKS, EVERY, KILLED = 4, 10, 15
LAYERS = 8
PEERS: dict[str, Any] = {"torchrun": False, "files": "10h", "memory": True}


def train(folder: Path, width: int, way: str) -> None:
    """One rank of one attempt."""
    import signal

    import torch
    import torch.distributed as dist
    from models import linears, sharded

    import anyrank

    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), not (folder / "killed").exists()
    table: dict[str, Any] = {"steps": []}
    model = sharded(linears([width] * LAYERS, bias=True), ())
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(4 * 40, width)
    loader = anyrank.ElasticLoader(rows, global_batch=4, microbatch=1)
    state = anyrank.TrainState(model, optimizer, data=loader)
    path = str(folder / "run")
    with anyrank.Checkpoints(path, state, every=EVERY, peers=PEERS[way]) as ckpts:
        report = ckpts.resume()
        table["from"] = report and report.step
        for step in ckpts.steps(until=EVERY * 2 + 5):
            for x in step.microbatches(model):
                if first and rank == 1 and step.number == KILLED:
                    (folder / "killed").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            table["steps"].append(time.time())
            if rank == 0:
                (folder / f"attempt-{int(not first)}.json").write_text(json.dumps(table))


def kill_once(width: int, way: str) -> Run:
    """One kill and what followed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if way == "torchrun":
            line = torchrun(RANKS)
        else:
            code = "from anyrank.cli import main; main()"
            line = [sys.executable, "-c", code, "run", "--ranks", f"{RANKS}", "--then", f"{RANKS}"]
        line += [__file__, "train", name, f"{width}", way]
        for _ in range(2 if way == "torchrun" else 1):
            ended = subprocess.run(
                line, env=os.environ | ENVIRON, capture_output=True, text=True, check=False
            )
        if ended.returncode:
            raise SystemExit(ended.stderr[-3000:])
        killed = float((folder / "killed").read_text())
        after = json.loads((folder / "attempt-1.json").read_text())
    assert after["from"] == (KILLED if way == "memory" else EVERY), after["from"]
    new = after["steps"][KILLED - after["from"]]
    return {"to_step": after["steps"][0] - killed, "to_new": new - killed}


def measure(options: argparse.Namespace, _: Launcher) -> Run:
    """The three ways in turn, and their ratios to the first."""
    width = options.width
    case = Case("kill", PEERS, lambda way, _: kill_once(width, way))
    runs = case.run(options.repeats)
    found = {
        way: {title: ratios(runs[way], runs["torchrun"], title)["median"] for title in runs[way][0]}
        for way in ("files", "memory")
    }
    tell("ratios to torchrun", found)
    return {
        "ranks": RANKS,
        "every": EVERY,
        "killed_in_step": KILLED,
        "state_mib": round(LAYERS * (width + 1) * width * 4 * 3 / MIB),
        "runs": runs,
        "ratios": found,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        bench.main("peers", measure, {"repeats": 1, "width": 64}, repeats=3, width=1024)
