"""Live weights from one layout into another: `anyrank.sync`, and what trainers do today.

    python benchmarks/sync.py                # 256 MiB and 2 GiB, 4 ranks, 5 repeats, in turn
    python benchmarks/sync.py --mib 64 --repeats 3
    python benchmarks/sync.py --quick        # 8 MiB once, nothing is written

Two cases: FSDP2 on one half of the ranks into tensor parallel on the other; FSDP2 on all ranks into
tensor parallel on the same. Beside it: each tensor whole on every rank, which keeps its part; DCP
through files in memory (/dev/shm); torch's own redistribute, where both ends are on the same ranks.
Every result is compared bit by bit with the weights that were sent. Memory is of each rank above
the shares: a device's own, or anonymous memory, sampled every 2 ms; before each call malloc gives
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
import warnings
from collections.abc import Callable
from typing import Any

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import MIB, Case, Run, Runs, median, ratios, slowest, tell
from frozen import quiet_bytes
from launch import Launcher, device, timed
from models import local_part, sharded, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anyrank

LAYERS, WIDTH = 8, 1024
Ends = tuple[list[int], list[int]]  # the ranks that send, and those that receive


def cases_of(size: int) -> dict[str, Ends]:
    """From one half to the other, where there are two, and from all ranks to the same."""
    ranks, half = [*range(size)], size // 2
    apart = {f"{half} to {half} others": (ranks[:half], ranks[half:])} if half else {}
    return apart | {f"the same {size}": (ranks, ranks)}


class Block(nn.Module):
    """Two matrices, one cut by rows and one by columns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)


def build(mib: int, seed: int) -> nn.Sequential:
    """`mib` MiB of float32."""
    torch.manual_seed(seed)
    blocks = (Block(mib * MIB // 4 // LAYERS // WIDTH // 2) for _ in range(LAYERS))
    return nn.Sequential(*blocks).to(device())


def part(tensor: Any, full: torch.Tensor) -> torch.Tensor:
    """A rank's part of a whole tensor, cut as a DTensor is."""
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            number, index = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
            full = full.chunk(number, placement.dim)[index]
    return full


def by_hand(dst: Any, src: Any, names: list[tuple[str, torch.Size]], disjoint: bool) -> None:
    """What trainers do: each tensor whole on every rank, which keeps its own part."""
    have = dict(src.named_parameters()) if src is not None else {}
    want = dict(dst.named_parameters()) if dst is not None else {}
    for name, shape in names:
        full = whole(have[name]) if have else torch.empty(shape, device=device())
        if disjoint:
            dist.broadcast(full, 0)
        if want:
            local_part(want[name]).copy_(part(want[name], full))


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
        local_part(tensor).copy_(given.redistribute(placements=placements).to_local())


def ends_of(mib: int, ends: Ends) -> tuple[Any, Any]:
    """The model that receives and the one that sends, where this rank is an end of the case."""
    from_ranks, to_ranks = ends
    meshes = DeviceMesh(device().type, from_ranks), DeviceMesh(device().type, to_ranks)
    src = dst = None
    if dist.get_rank() in from_ranks:
        src = build(mib, 1)
        src = sharded(src, src, meshes[0])
    if dist.get_rank() in to_ranks:
        dst = build(mib, 2)
        plan = {f"{n}.up": ColwiseParallel() for n in range(LAYERS)}
        plan |= {f"{n}.down": RowwiseParallel() for n in range(LAYERS)}
        parallelize_module(dst, meshes[1], plan, src_data_rank=None)
    return dst, src


def pass_weights(mib: int, case: str, ends: Ends, repeats: int, folder: str) -> Runs:
    """One rank: the ways in turn."""
    warnings.simplefilter("ignore")
    dst, src = ends_of(mib, ends)
    expected = {name: p.detach().clone() for name, p in build(mib, 1).named_parameters()}
    names = [(name, p.shape) for name, p in expected.items()]
    mine = dict(dst.named_parameters()) if dst is not None else {}
    wanted = {name: part(p, expected[name]).clone() for name, p in mine.items()}
    del expected
    disjoint = ends[0] != ends[1]
    groups = tuple(map(dist.new_group, ends))
    baseline = "gather and broadcast" if disjoint else "full_tensor, keep own part"
    ways: dict[str, Callable[[], Any]] = {
        "anyrank.sync": lambda: anyrank.sync(dst, src).bytes_sent[dist.get_rank()],
        baseline: lambda: by_hand(dst, src, names, disjoint),
        "DCP through /dev/shm": lambda: by_dcp(dst, src, groups, folder),
    }
    if not disjoint:
        ways["redistribute"] = lambda: by_redistribute(dst, src)
    trim = ctypes.CDLL(None).malloc_trim
    most = dict.fromkeys(ways, 0)  # bytes of memory; the warm-up counts for them too

    def once(way: str, number: int) -> Run:
        with torch.no_grad():
            for tensor in mine.values():
                local_part(tensor).fill_(7)
        gc.collect()
        trim(0)
        counted: list[int | None] = []
        before = quiet_bytes()
        with torch.no_grad():
            table = timed(lambda: counted.append(ways[way]()), watch_host=True)
        sent = quiet_bytes() - before if counted[0] is None else counted[0]
        assert all(torch.equal(local_part(p), wanted[n]) for n, p in mine.items()), (case, way)
        most[way] = max(most[way], table["peak_bytes"])
        return {"seconds": table["seconds"], "memory": most[way], "sent": sent}

    return Case(case, ways, once).run(repeats, warm=1, is_told=False)


# -- figures --------------------------------------------------------------------------------------


def rows_of(mib: int, case: str, by_rank: list[Runs]) -> list[Run]:
    """One row a way: the median, all times, and each rank's most memory and bytes sent."""
    times = slowest(by_rank)
    rows: list[Run] = []
    for way, runs in times.items():
        mine = [each[way] for each in by_rank]
        row: Run = {"mib": mib, "case": case, "way": way}
        row["median_sec"] = round(median(runs, "seconds"), 4)
        row["times_sec"] = [round(run["seconds"], 4) for run in runs]
        row["memory_mib"] = [round(each[-1]["memory"] / MIB, 1) for each in mine]
        row["sent_mib"] = [round(median(each, "sent") / MIB, 1) for each in mine]
        if rows:
            ratio = ratios(times["anyrank.sync"], runs, "seconds")["median"]
            row["anyrank_of_it"] = round(ratio, 2)
        rows.append(row)
        tell("sync", row)
    rows[0]["of_baseline"] = rows[1]["anyrank_of_it"]
    return rows


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Both cases in each size."""
    rows: list[Run] = []
    for mib, (case, ends) in itertools.product(options.mib, cases_of(options.ranks).items()):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            given = (mib, case, ends, options.repeats, folder)
            rows += rows_of(mib, case, launcher.values(options.ranks, pass_weights, *given))
    result: Run = {"repeats": options.repeats, "rows": rows}
    return result | {"goals": goals_of(result)}


LEAST_SENT = {"2 to 2 others": 1, "the same 4": 3 / 8}  # of the weights, by case


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did: each byte is sent once."""
    goals: list[Run] = []
    for row in result["rows"]:
        if row["way"] != "anyrank.sync" or row["case"] not in LEAST_SENT:
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
    bench.main("sync", measure, small, ["mib"], mib=[256, 2048], ranks=4, repeats=5)
