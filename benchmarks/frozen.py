"""A frozen part under DDP: what it costs to send, and whether ranks that differ are noticed.

    python benchmarks/frozen.py              # 128 MiB of parameters, 128 MiB of buffers, 4 ranks

Bytes are those that each rank's own sockets have sent, as the kernel counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

from figures import keep
from launch import Launcher, settle
from machine import describe_machine

KINDS = {
    "none": "no frozen part",
    "default": "DDP(model)",
    "no_buffers": "DDP(model, broadcast_buffers=False)",
    "ignored": "ignored by DDP, parameters and buffers",
    "freeze": "anyrank.freeze(part), then DDP(model)",
}
STEPS = 3
MIB = 1 << 20
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
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.1)
    return sent_bytes()


def make_model(mib: int, rank_changed: bool) -> Any:
    """A trainable layer behind a frozen part of `mib` MiB of parameters and as much of buffers."""
    import torch
    from torch import nn

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(8):
                values = torch.full((mib * MIB // 4 // 8,), 0.5 + number)
                weight = nn.Parameter(values, requires_grad=False)
                self.register_parameter(f"weight{number}", weight)
                self.register_buffer(f"mean{number}", values.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight0[:1] + self.mean0[:1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part() if mib else None
            self.head = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x if self.part is None else self.part(x))

    torch.manual_seed(0)
    model = Model()
    if rank_changed:
        with torch.no_grad():
            model.part.mean7[0] += 1
    return model


def run(rank: int, size: int, kind: str, mib: int, files: str, damage: bool) -> Iterator[Any]:
    """The job of one rank; see `Launcher.run`. With `damage`, rank 1's frozen part differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import anyrank

    warnings.simplefilter("ignore")
    model = make_model(0 if kind == "none" else mib, damage and rank == 1)
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
    part = model.part or torch.nn.Identity()
    sums = [float(one.double().sum()) for one in (*part.parameters(), *part.buffers())]
    yield {"built_bytes": built, "step_bytes": steps, "sums": sums}


def save_files(mib: int, folder: str) -> None:
    """The frozen part's weights in a file of their own, and the rest in another."""
    from safetensors.torch import save_file

    model = make_model(mib, False)
    save_file(model.part.state_dict(), os.path.join(folder, "part.safetensors"))
    head = {f"head.{key}": value for key, value in model.head.state_dict().items()}
    save_file(head, os.path.join(folder, "head.safetensors"))


def measure(launcher: Launcher, size: int, mib: int, kind: str, files: str) -> dict[str, Any]:
    """One kind: bytes with equal ranks, then whether a rank that differs is noticed."""
    row: dict[str, Any] = {"kind": kind, "title": KINDS[kind]}
    outcome = launcher.run(size, run, kind, mib, files, False)
    if outcome.error:
        return row | {"error": outcome.error.strip().splitlines()[-1]}
    counted = outcome.stages[2]
    row["built_bytes"] = sum(table["built_bytes"] for table in counted)
    row["step_bytes"] = round(sum(table["step_bytes"] for table in counted))
    row["checked_sec"] = round(max(table["checked_sec"] for table in outcome.stages[1]), 3)
    if kind == "none":
        return row
    outcome = launcher.run(size, run, kind, mib, files, True)
    if outcome.error:
        return row | {"error": outcome.error.strip().splitlines()[-1]}
    told = [table["told"] for table in outcome.stages[1]]
    same = len({tuple(table["sums"]) for table in outcome.stages[2]}) == 1
    row["told"] = told[0]
    row["a_rank_that_differs"] = (
        "raises on all ranks" if all(told) else "is overwritten" if same else "SILENT"
    )
    return row


def beyond(row: dict[str, Any], without: dict[str, Any]) -> None:
    """Add what the frozen part costs: bytes beyond those of the model without it."""
    for key in ("built_bytes", "step_bytes"):
        if key in row and key in without:
            row[f"frozen_{key}"] = row[key] - without[key]


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=128, help="of parameters, and of buffers")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 8 MiB, nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.mib = 2, 8
    launcher = Launcher("preload")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_files(options.mib, folder)
        for kind in KINDS:
            row = measure(launcher, options.ranks, options.mib, kind, folder)
            rows.append(json.loads(json.dumps(row).replace(folder, "FOLDER")))
            beyond(rows[-1], rows[0])
            print(json.dumps(rows[-1]), flush=True)
    result = describe_machine() | {"ranks": options.ranks, "mib": options.mib, "rows": rows}
    if not options.quick:
        keep("frozen", result)


if __name__ == "__main__":
    main()
