"""Live weights from one layout into another: `anyrank.sync`, and what trainers do today.

    python benchmarks/sync.py                # 256 MiB and 2 GiB, 4 ranks, 5 repeats, in turn
    python benchmarks/sync.py --mib 64 --repeats 3
    python benchmarks/sync.py --quick        # 8 MiB once, nothing is written

Two cases: FSDP2 on ranks 0 and 1 into tensor parallel on ranks 2 and 3; FSDP2 on 4 ranks into
tensor parallel on the same 4. Beside it: each tensor whole on every rank, which keeps its part; DCP
through files in memory (/dev/shm); torch's own redistribute, where both ends are on the same ranks.
Every result is compared bit by bit with the weights that were sent. Memory is
anonymous memory of each rank above the shares, sampled every 2 ms; before each call malloc gives
back what is free, so that each counts as the first. Bytes are those that each rank has sent: as the
kernel counts those of its sockets for what trainers do; as the report has them for anyrank, whose
sockets are closed when it returns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import MIB, Case, Run, Runs, median, ratios, slowest, tell
from frozen import quiet_bytes
from launch import Launcher
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weights import local_part as local

import anyrank
from anyrank.testing import PeakMemory

LAYERS, WIDTH = 8, 1024
CASES = {"2 to 2 others": ([0, 1], [2, 3]), "the same 4": ([0, 1, 2, 3], [0, 1, 2, 3])}
BASELINES = {"2 to 2 others": "gather and broadcast", "the same 4": "full_tensor, keep own part"}


class Block(nn.Module):
    """Two matrices, one cut by rows and one by columns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)


def build(mib: int, seed: int) -> nn.Sequential:
    """`mib` MiB of float32."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(mib * MIB // 4 // LAYERS // WIDTH // 2) for _ in range(LAYERS)))


def part(tensor: Any, whole: torch.Tensor) -> torch.Tensor:
    """A rank's part of a whole tensor, cut as a DTensor is."""
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            number, index = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
            whole = whole.chunk(number, placement.dim)[index]
    return whole


def by_hand(dst: Any, src: Any, names: list[tuple[str, torch.Size]], disjoint: bool) -> None:
    """What trainers do: each tensor whole on every rank, which keeps its own part."""
    have = dict(src.named_parameters()) if src is not None else {}
    want = dict(dst.named_parameters()) if dst is not None else {}
    for name, shape in names:
        full = have[name].detach().full_tensor() if have else torch.empty(shape)
        if disjoint:
            dist.broadcast(full, 0)
        if want:
            local(want[name]).copy_(part(want[name], full))


def by_dcp(dst: Any, src: Any, groups: tuple[Any, Any], folder: str) -> None:
    """A save and a load through files in memory."""
    if src is not None:
        tensors = {name: p.detach() for name, p in src.named_parameters()}
        dcp.save(tensors, checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    if dst is not None:
        tensors = {name: p.detach() for name, p in dst.named_parameters()}
        dcp.load(tensors, checkpoint_id=folder, process_group=groups[1])


def by_redistribute(dst: Any, src: Any) -> None:
    """Torch's own way from one placement into another, on one mesh."""
    have = dict(src.named_parameters())
    for name, tensor in dst.named_parameters():
        given = have[name].detach()
        placements = getattr(tensor, "placements", [Replicate()])
        local(tensor).copy_(given.redistribute(placements=placements).to_local())


def ends_of(mib: int, case: str) -> tuple[Any, Any]:
    """The model that receives and the one that sends, where this rank is an end of the case."""
    from_ranks, to_ranks = CASES[case]
    meshes = DeviceMesh("cpu", from_ranks), DeviceMesh("cpu", to_ranks)
    src = dst = None
    if dist.get_rank() in from_ranks:
        src = build(mib, 1)
        for layer in src:
            fully_shard(layer, mesh=meshes[0])
        fully_shard(src, mesh=meshes[0])
    if dist.get_rank() in to_ranks:
        dst = build(mib, 2)
        plan = {f"{n}.up": ColwiseParallel() for n in range(LAYERS)}
        plan |= {f"{n}.down": RowwiseParallel() for n in range(LAYERS)}
        parallelize_module(dst, meshes[1], plan, src_data_rank=None)
    return dst, src


def pass_weights(mib: int, case: str, repeats: int, folder: str) -> Runs:
    """One rank: the ways in turn."""
    warnings.simplefilter("ignore")
    dst, src = ends_of(mib, case)
    expected = {name: p.detach().clone() for name, p in build(mib, 1).named_parameters()}
    names = [(name, p.shape) for name, p in expected.items()]
    mine = dict(dst.named_parameters()) if dst is not None else {}
    wanted = {name: part(p, expected[name]).clone() for name, p in mine.items()}
    del expected
    disjoint = case == "2 to 2 others"
    groups = tuple(map(dist.new_group, CASES[case]))
    ways: dict[str, Callable[[], Any]] = {
        "anyrank.sync": lambda: anyrank.sync(dst, src).bytes_sent[dist.get_rank()],
        BASELINES[case]: lambda: by_hand(dst, src, names, disjoint),
        "DCP through /dev/shm": lambda: by_dcp(dst, src, groups, folder),
    }
    if not disjoint:
        ways["redistribute"] = lambda: by_redistribute(dst, src)
    trim = ctypes.CDLL(None).malloc_trim
    most = dict.fromkeys(ways, 0)  # bytes of memory; the warm-up counts for them too

    def once(way: str, number: int) -> Run:
        with torch.no_grad():
            for tensor in mine.values():
                local(tensor).fill_(7)
        gc.collect()
        trim(0)
        before = quiet_bytes()
        dist.barrier()
        with PeakMemory() as peak, torch.no_grad():
            start = time.perf_counter()
            counted = ways[way]()
            dist.barrier()
            seconds = time.perf_counter() - start
        sent = quiet_bytes() - before if counted is None else counted
        assert all(torch.equal(local(p), wanted[n]) for n, p in mine.items()), (case, way)
        most[way] = max(most[way], peak.peak_bytes)
        return {"seconds": seconds, "memory": most[way], "sent": sent}

    return Case(case, ways, once).run(repeats, warm=1, is_told=False)


# -- figures --------------------------------------------------------------------------------------


def rows_of(mib: int, case: str, by_rank: list[Runs]) -> list[Run]:
    """One row a way: the median, all times, and each rank's most memory and bytes sent."""
    times = slowest(by_rank)
    rows: list[Run] = []
    for way, runs in times.items():
        mine = [each[way] for each in by_rank]
        row: Run = {"mib": mib, "case": case, "way": way}
        row["median_sec"] = round(median(runs, "seconds"), 3)
        row["times_sec"] = [round(run["seconds"], 3) for run in runs]
        row["memory_mib"] = [round(each[-1]["memory"] / MIB, 1) for each in mine]
        row["sent_mib"] = [round(median(each, "sent") / MIB, 1) for each in mine]
        if rows:
            ratio = ratios(times["anyrank.sync"], runs, "seconds")["median"]
            row["anyrank_of_it"] = round(ratio, 2)
        rows.append(row)
    rows[0]["of_baseline"] = rows[1]["anyrank_of_it"]
    return rows


def measure(options: argparse.Namespace) -> Run:
    """Both cases in each size."""
    launcher, rows = Launcher("sync"), list[Run]()
    for mib, case in itertools.product(options.mib, CASES):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            by_rank = launcher.values(4, pass_weights, mib, case, options.repeats, folder)
        rows += rows_of(mib, case, by_rank)
        for row in rows[-len(by_rank[0]) :]:
            tell("sync", row)
    result: Run = {"repeats": options.repeats, "rows": rows}
    return result | {"goals": goals_of(result)}


LEAST_SENT = {"2 to 2 others": 1, "the same 4": 3 / 8}  # of the weights, by case


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did: each byte is sent once."""
    goals: list[Run] = []
    for row in result["rows"]:
        if row.get("way") != "anyrank.sync":
            continue
        where = f"{row['mib']} MiB, {row['case']}"
        sent = sum(row["sent_mib"]) / (row["mib"] * LEAST_SENT[row["case"]])
        goals += [
            bench.goal(f"{where}: sent / the least", sent, 1.01),
            bench.goal(f"{where}: time / gather and broadcast", row["of_baseline"], 0.6),
            bench.goal(f"{where}: MiB beside the shares", max(row["memory_mib"]), 16),
        ]
    return goals


if __name__ == "__main__":
    small = {"mib": [8], "repeats": 1}
    bench.main("sync", measure, small, ["mib"], mib=[256, 2048], repeats=5)
