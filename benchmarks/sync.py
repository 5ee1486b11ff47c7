"""Live weights from one layout into another: `anyrank.sync`, and what trainers do today.

    python benchmarks/sync.py                # 256 MiB to 2 GiB, 4 ranks, 5 repeats, in turn
    python benchmarks/sync.py --mib 64 --repeats 3

Two cases: FSDP2 on ranks 0 and 1 into tensor parallel on ranks 2 and 3; FSDP2 on 4 ranks into
tensor parallel on the same 4. Beside it: each tensor whole on every rank, which keeps its part; DCP
through files in memory (/dev/shm); torch's own redistribute, where both ends are on the same ranks.
Then 1,000 tensors of 16 elements, where what counts is not their bytes: the time of a look at both
ends, of the plan with its agreement, and of the whole call, the first time and later, on 2 ranks.
Every result is compared bit by bit with the weights that were sent. Memory is anonymous memory of
each rank above the shares, sampled every 2 ms; before each call malloc gives back what is free, so
that each counts as the first. Bytes are those that
each rank has sent: as the kernel counts those of its sockets for what trainers do; as the report
has them for anyrank, whose sockets are closed when it returns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import keep
from frozen import quiet_bytes
from machine import describe_machine, load_average
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anyrank
from anyrank.filling.ends import look
from anyrank.filling.planning import SyncCall, agree_plan
from anyrank.model.options import LoadOptions
from anyrank.testing import PeakMemory, run_ranks
from anyrank.world.ranks import open_ranks

MIB = 1 << 20
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


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


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


def job(mib: int, case: str, repeats: int, folder: str) -> list[dict[str, Any]]:
    """One rank: the contenders in turn; a row for each."""
    torch.set_num_threads(1)
    from_ranks, to_ranks = CASES[case]
    meshes = DeviceMesh("cpu", from_ranks), DeviceMesh("cpu", to_ranks)
    src: Any = None
    dst: Any = None
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
    expected = {name: p.detach().clone() for name, p in build(mib, 1).named_parameters()}
    wanted = {n: part(p, expected[n]).clone() for n, p in dst.named_parameters()} if dst else {}
    names = [(name, p.shape) for name, p in expected.items()]
    del expected
    disjoint = from_ranks != to_ranks

    def ours() -> int:
        return anyrank.sync(dst, src).bytes_sent[dist.get_rank()]

    groups = dist.new_group(from_ranks), dist.new_group(to_ranks)
    ways: dict[str, Callable[[], int | None]] = {
        "anyrank.sync": ours,
        BASELINES[case]: lambda: by_hand(dst, src, names, disjoint),
        "DCP through /dev/shm": lambda: by_dcp(dst, src, groups, folder),
    }
    if not disjoint:
        ways["redistribute"] = lambda: by_redistribute(dst, src)
    trim = ctypes.CDLL(None).malloc_trim
    rows: list[dict[str, Any]] = []
    for repeat in range(-1, repeats):  # the first is a warm-up
        for name, work in ways.items():
            for tensor in dst.parameters() if dst is not None else ():
                with torch.no_grad():
                    local(tensor).fill_(7)
            gc.collect()
            trim(0)
            before = quiet_bytes()
            dist.barrier()
            with PeakMemory() as peak, torch.no_grad():
                start = time.perf_counter()
                counted = work()
                dist.barrier()
                seconds = time.perf_counter() - start
            sent = quiet_bytes() - before if counted is None else counted
            right = (
                all(torch.equal(local(p), wanted[n]) for n, p in dst.named_parameters())
                if dst is not None
                else True
            )
            assert right, (case, name)
            row = {"way": name, "seconds": seconds, "memory": peak.peak_bytes, "sent": sent}
            rows.append(row | {"is_timed": repeat >= 0})
    return rows


def small(kind: str, repeats: int) -> dict[str, list[float]]:
    """One rank: milliseconds of the parts of a call with 1,000 tensors, the first one first; of the
    clock, and of the cores.
    """
    torch.set_num_threads(1)
    src, dst = (
        nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))) for _ in range(50)))
        for _ in range(2)
    )
    if kind == "FSDP2 on both":
        for model in (src, dst):
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
    ends = (dst, src)
    if kind == "plain, 1 to 1":
        ends = (None, src) if dist.get_rank() == 0 else (dst, None)

    def look_at_both() -> tuple[Any, Any]:
        return look(ends[0]), look(ends[1])

    kept: Any = None

    def plan() -> None:
        nonlocal kept
        kept = agree_plan(SyncCall(*ends, LoadOptions(), atomic=False), ranks, kept).kept

    times: dict[str, list[float]] = {}
    with open_ranks(None, "the benchmark") as ranks, torch.no_grad():
        calls = {"look": look_at_both, "plan": plan, "call": anyrank.Sync(*ends)}
        for _ in range(repeats):
            for name, work in calls.items():
                dist.barrier()
                start, cores = time.perf_counter(), time.process_time()
                work()
                seconds = time.perf_counter() - start, time.process_time() - cores
                for unit, each in zip(("ms", "cpu_ms"), seconds, strict=True):
                    times.setdefault(f"{name}_{unit}", []).append(1000 * each)
    return times


def small_rows(repeats: int) -> list[dict[str, Any]]:
    """One row a layout: milliseconds on the slowest rank."""
    rows: list[dict[str, Any]] = []
    for kind in ("plain, 1 to 1", "FSDP2 on both"):
        made = run_ranks(2, small, kind, repeats, timeout=200)
        row: dict[str, Any] = {"case": f"1,000 tensors, {kind}"}
        for name in made[0]:
            slowest = [max(each) for each in zip(*(times[name] for times in made), strict=True)]
            row[name] = round(statistics.median(slowest[1:]), 1)
            row[f"first_{name}"] = round(slowest[0], 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def summary(case: str, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a contender: the median, all times, and each rank's most memory and bytes sent."""
    found: list[dict[str, Any]] = []
    for way in dict.fromkeys(row["way"] for row in ranks[0]):
        mine = [[row for row in rows if row["way"] == way] for rows in ranks]
        # The warm-up counts for memory alone.
        together = [same for same in zip(*mine, strict=True) if same[0]["is_timed"]]
        times = [max(row["seconds"] for row in same) for same in together]
        found.append(
            {
                "case": case,
                "way": way,
                "median_sec": round(statistics.median(times), 3),
                "times_sec": [round(seconds, 3) for seconds in times],
                "memory_mib": [round(max(row["memory"] for row in rows) / MIB, 1) for rows in mine],
                "sent_mib": [
                    round(statistics.median(row["sent"] for row in rows) / MIB, 1) for rows in mine
                ],
            }
        )
    ours = found[0]["times_sec"]
    for other in found[1:]:
        ratios = [a / b for a, b in zip(ours, other["times_sec"], strict=True)]
        other["anyrank_of_it"] = round(statistics.median(ratios), 2)
    found[0]["of_baseline"] = found[1]["anyrank_of_it"]
    return found


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mib, case in itertools.product(options.mib, CASES):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            made = run_ranks(4, job, mib, case, options.repeats, folder, timeout=600)
        found = [{"mib": mib} | row for row in summary(case, made)]
        print(*map(json.dumps, found), sep="\n", flush=True)
        rows += found
    rows += small_rows(4 * options.repeats)
    result = describe_machine() | {"load_average": load_average()}
    result |= {"repeats": options.repeats, "rows": rows}
    keep("sync", result)


if __name__ == "__main__":
    main()
