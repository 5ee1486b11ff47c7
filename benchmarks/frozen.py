"""A frozen part under DDP: what it costs to send, and whether ranks that differ are noticed.

    python benchmarks/frozen.py              # 128 MiB of parameters, 128 MiB of buffers, 4 ranks
    python benchmarks/frozen.py --quick      # 8 MiB, 2 ranks, nothing is written

Bytes are those that each rank's own sockets have sent, as the kernel counts them.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import tempfile
import time
import warnings
from typing import Any

import bench
import torch
import torch.distributed as dist
from bench import MIB, Case, Run
from launch import Launcher, Stages, settle
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank

KINDS = {
    "none": "no frozen part",
    "default": "DDP(model)",
    "no_buffers": "DDP(model, broadcast_buffers=False)",
    "ignored": "ignored by DDP, parameters and buffers",
    "freeze": "anyrank.freeze(part), then DDP(model)",
}
STEPS = 3
BYTES_SENT_AT = 200  # of tcpi_bytes_sent in struct tcp_info, since Linux 4.19


def sent_bytes() -> int:
    """Bytes of payload that this process's open TCP sockets have sent, repeats included."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT_AT + 8)
        except OSError:  # closed meanwhile, or no TCP socket
            continue
        total += struct.unpack_from("Q", info, BYTES_SENT_AT)[0]
    return total


def quiet_bytes() -> int:
    """`sent_bytes` once all ranks have come here and nothing is under way. All ranks."""
    dist.barrier()
    time.sleep(0.1)
    return sent_bytes()


class Part(nn.Module):
    """The frozen part: `mib` MiB of parameters, and as much of buffers."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        for number in range(8):
            values = torch.full((mib * MIB // 4 // 8,), 0.5 + number)
            self.register_parameter(f"weight{number}", nn.Parameter(values, requires_grad=False))
            self.register_buffer(f"mean{number}", values.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight0[:1] + self.mean0[:1]


class Model(nn.Module):
    """A trainable layer behind a frozen part; of 0 MiB, behind none."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.part = Part(mib) if mib else nn.Identity()
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


def run(kind: str, mib: int, files: str, damage: bool) -> Stages:
    """The job of one rank; see `Launcher.run`. With `damage`, rank 1's frozen part differs."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = Model(0 if kind == "none" else mib)
    if damage and dist.get_rank() == 1:
        with torch.no_grad():
            model.part.mean7[0] += 1
    if kind == "freeze":
        anyrank.freeze(model.part, source=os.path.join(files, "part.safetensors"))
    settle()
    dist.barrier()
    yield {}

    start, told = time.perf_counter(), ""
    if kind == "freeze":
        try:  # what a run does at its start anyway
            anyrank.load(model, os.path.join(files, "head.safetensors"))
        except anyrank.AnyrankError as error:
            told = f"{type(error).__name__}: {error}"
    checked_sec = time.perf_counter() - start
    yield {"checked_sec": checked_sec, "told": told}

    options: dict[str, Any] = {"broadcast_buffers": kind != "no_buffers"}
    if kind == "ignored":
        names = [f"part.{n}" for n, _ in model.part.named_parameters()]
        names += [f"part.{n}" for n, _ in model.part.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    before = quiet_bytes()
    ddp = DistributedDataParallel(model, **options)
    built = quiet_bytes() - before
    for _ in range(2):  # DDP arranges its buckets anew after the first step
        ddp(torch.ones(2, 16)).sum().backward()
    before = quiet_bytes()
    for _ in range(STEPS):
        ddp(torch.ones(2, 16)).sum().backward()
    steps = (quiet_bytes() - before) / STEPS
    held = (*model.part.parameters(), *model.part.buffers())
    sums = [float(one.double().sum()) for one in held]
    yield {"built_bytes": built, "step_bytes": steps, "sums": sums}


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Every kind, beside the same model without the part."""
    size, mib = options.ranks, options.mib
    with tempfile.TemporaryDirectory() as folder:
        model = Model(mib)
        save_file(model.part.state_dict(), os.path.join(folder, "part.safetensors"))
        head = {f"head.{key}": value for key, value in model.head.state_dict().items()}
        save_file(head, os.path.join(folder, "head.safetensors"))

        def once(kind: str, number: int) -> Run:
            """Bytes with equal ranks, then whether a rank that differs is noticed."""
            _, checked, counted = launcher.tables(size, run, kind, mib, folder, False)
            row: Run = {"kind": kind, "title": KINDS[kind]}
            row["built_bytes"] = sum(table["built_bytes"] for table in counted)
            row["step_bytes"] = round(sum(table["step_bytes"] for table in counted))
            row["checked_sec"] = round(max(table["checked_sec"] for table in checked), 3)
            if kind == "none":
                return row
            _, checked, counted = launcher.tables(size, run, kind, mib, folder, True)
            told = [table["told"] for table in checked]
            same = len({tuple(table["sums"]) for table in counted}) == 1
            row["told"] = told[0].replace(folder, "FOLDER")
            row["a_rank_that_differs"] = (
                "raises on all ranks" if all(told) else "is overwritten" if same else "SILENT"
            )
            return row

        rows = [*Case("frozen", KINDS, once).once().values()]
    for row in rows:
        for figure in ("built_bytes", "step_bytes"):
            row[f"frozen_{figure}"] = row[figure] - rows[0][figure]
    result: Run = {"ranks": size, "mib": mib, "rows": rows}
    return result | {"goals": goals_of(result)}


def goals_of(result: Run) -> list[Run]:
    """What a part is to cost after `freeze`, and what it does."""
    rows = {row["kind"]: row for row in result["rows"]}
    ours, plain = rows["freeze"], rows["default"]
    return [
        bench.goal("freeze, bytes at construction", ours["frozen_built_bytes"], 0),
        bench.goal(
            "freeze, bytes a step / plain DDP's",
            ours["frozen_step_bytes"] / plain["frozen_step_bytes"],
            0,
        ),
        bench.goal(
            "freeze, a rank that differs is not raised on all",
            float(ours["a_rank_that_differs"] != "raises on all ranks"),
            0,
        ),
    ]


if __name__ == "__main__":
    bench.main("frozen", measure, {"ranks": 2, "mib": 8}, ranks=4, mib=128)
