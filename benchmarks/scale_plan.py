"""What one rank of a thousand computes in a save and a resume: CPU seconds, bytes and memory.

    python benchmarks/scale_plan.py  # results/scale_plan.json

One process plays the first rank of N, another one of the others: no plan asks another rank. The
model is a Llama of 70B with Adam, as tensors and shapes of rows; no payload is written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import bench

T = TypeVar("T")
ROWS = 4  # of each tensor, on each rank


def play(size: int, count: int, rank: int) -> None:
    """One rank's part of a save, and of a resume on as many ranks and on seven. Prints lines."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from anyrank.files.manifest import RankFiles, index_name
    from anyrank.files.storage import storage_for, write_file
    from anyrank.models.mesh_coordinates import coordinates_of_all
    from anyrank.models.spreads import spreads_of
    from anyrank.models.tensors import find_tensors
    from anyrank.runs.saving.metadata import write_metadata
    from anyrank.runs.saving.rank_file import make_items
    from anyrank.runs.saving.run_folder import RunFolder
    from anyrank.sources.rank_index import Placed, RankIndex
    from anyrank.sources.step_index import index_of, parse
    from anyrank.sources.step_listing import StepLocator
    from anyrank.sources.torch_zip import place_zip
    from anyrank.tensors.writes import plan_writes

    stack = contextlib.ExitStack()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    def make_model(ranks: int) -> nn.Module:
        mesh, model = init_device_mesh("cpu", (ranks,)), nn.Module()
        rows = size * ROWS
        for number in range(count):
            local = torch.empty(len(range(rows)[: -(-rows // ranks)]), 4, device="meta")
            tensor = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 4)), stride=(4, 1)
            )
            model.register_parameter(f"weight_{number}", nn.Parameter(tensor))
        return model

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="anyrank-plan-"))
    store, step = storage_for(folder), f"{folder}/step-00000001"
    os.mkdir(step)
    tensors: Any = find_tensors(make_model(size))
    everybody: Any = SimpleNamespace(size=size, ranks=tuple(range(size)), index=rank, rank=rank)

    def plan_own() -> Any:
        coordinates = coordinates_of_all(tensors, everybody, are_alike=True)
        plan = plan_writes(tensors, spreads_of(tensors, coordinates, everybody), size)
        index = index_of(tensors, plan)
        return plan, index, make_items(tensors, plan.writes_of(rank))

    def index_of_rank(writer: int) -> bytes:
        start, placed = 0, dict[int, list[Placed]]()
        for number, piece in plan.writes_of(writer):
            span = place_zip(piece.box.sizes, torch.float32, start)
            placed.setdefault(number, []).append(Placed(piece.box, span.payload))
            start = span.next
        return RankIndex(placed, {}).to_bytes()

    plan, index, _ = timed("save: plan, items", plan_own)
    own = timed("save: its index", lambda: index_of_rank(rank))
    print_bytes("save: its index", len(own))
    # Only indexes that are read below are written; those of the other ranks have the same size.
    records = {
        n: write_file(store, f"{step}/{index_name(n)}", index_of_rank(n))
        for n in range(size)
        if n == rank or abs(n - rank * size / 7) < size / 7 + 2
    }
    files = [RankFiles(count << 12, records.get(n, records[rank])) for n in range(size)]
    if rank == 0:
        data = timed("save: tensors.json", index.to_bytes)
        print_bytes("save: tensors.json", len(data))
        run = RunFolder(store, folder)
        manifest: Any = SimpleNamespace(ranks=files)
        args = (run, "step-00000001", plan, index, manifest, {}, False)
        timed("save: the first .metadata, after the commit", lambda: write_metadata(*args))
        print_bytes("save: .metadata", os.path.getsize(f"{step}/.metadata"))
    data = index.to_bytes()
    for ranks in (size, 7):
        wanted: Any = tensors if ranks == size else find_tensors(make_model(ranks))

        def resume(wanted: Any = wanted) -> StepLocator:
            locator = StepLocator(step, files, parse(data, "tensors.json", files), ())
            shapes = locator.list_shapes().tensors
            pairs = [(shapes[tensor.name], tensor.pieces) for tensor in wanted]
            locator.read(locator.ranks_for(pairs), 1)
            locator.with_chunks(pairs)
            return locator

        if rank < ranks:
            locator = timed(f"resume on {ranks}: which bytes", resume)
            read = sum(files[n].index.size for n in locator.indexes)
            print_bytes(f"resume on {ranks}: indexes, {len(locator.indexes)}", len(data) + read)
    stack.close()
    print(f"memory\t{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}\tMiB", flush=True)


def timed(name: str, work: Callable[[], T]) -> T:
    """Do it, and print its CPU seconds."""
    start = time.process_time()
    result = work()
    print(f"{name}\t{time.process_time() - start:.3f}\tCPU s", flush=True)
    return result


def print_bytes(name: str, nbytes: int) -> None:
    print(f"{name}\t{nbytes / bench.MIB:.3f}\tMiB", flush=True)


def measure(options: argparse.Namespace, _: Any) -> dict[str, Any]:
    """Every size, as the first rank and as another."""
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for rank in (0, 5):
            command = [sys.executable, str(Path(__file__)), "--play", *map(str, (size, rank))]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            args = [*command, "--tensors", str(options.tensors)]
            out = subprocess.run(args, stdout=subprocess.PIPE, text=True, check=True, env=env)
            for line in out.stdout.splitlines():
                name, value, unit = line.split("\t")
                rows.append(
                    {"ranks": size, "rank": rank, "what": name, "value": float(value), "unit": unit}
                )
                bench.tell(f"{size} ranks, rank {rank}: {name}", f"{value} {unit}")
    return {"tensors": options.tensors, "rows": rows}


if __name__ == "__main__":
    if "--play" in sys.argv:
        _, _, size, rank, _, count = sys.argv
        play(int(size), int(count), int(rank))
    else:
        bench.main(
            "scale_plan",
            measure,
            quick={"sizes": [16], "tensors": 64},
            choices=["sizes"],
            sizes=[256, 1024],
            tensors=2169,
        )
