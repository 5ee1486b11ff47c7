"""Many real ranks, forked from one process, in a network of their own: what each phase sends.

    unshare -n sh -c 'ip link set lo up; python benchmarks/scale_ranks.py 16 --tensors 128'

The network namespace is the meter, as nothing else sends on its loopback: bytes and packets do not
depend on what else the machine does, times do. Ranks are forked from a process that has imported
everything, so that hundreds fit into a small machine. Prints a line of JSON for each phase.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import anyrank
from anyrank.world.group import default_store
from anyrank.world.ranks import open_ranks

T = TypeVar("T")
STEPS = 5  # of a phase that is repeated
SETTLE_SEC = 0.3  # until what ranks have sent has been counted


class Net(nn.Module):
    """Many small layers, of which a step uses eight."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:8]:
            x = layer(x)
        return x + sum(p.sum() for layer in self.layers[8:] for p in layer.parameters()) * 0


class Meter:
    """Measures phases of all ranks.

    Args:
        rank, size: of the job.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.number = rank, size, 0

    def meet(self) -> None:
        """Wait for all ranks, by one counter of the store."""
        self.number += 1
        key, store = f"meter/{self.number}", default_store()
        store.add(key, 1)
        while store.add(key, 0) < self.size:
            time.sleep(max(0.1, 0.002 * self.size))  # all ranks ask one process
        time.sleep(SETTLE_SEC)

    def least(self, name: str, work: Callable[[], object]) -> None:
        """As `phase`, several times: the one that has sent the least, as a busy machine makes ranks
        wait, and ranks that wait look into the store.
        """
        lines = [self._measure(name, work, 1)[1] for _ in range(STEPS)]
        fewest = {key: min(line[key] for line in lines) for key in ("bytes", "packets")}
        self._tell(lines[-1] | fewest)

    def phase(self, name: str, work: Callable[[], T], times: int = 1) -> T:
        """Do work on all ranks, and say what it took."""
        result, line = self._measure(name, work, times)
        self._tell(line)
        return result

    def _tell(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            print(json.dumps(line), flush=True)

    def _measure(self, name: str, work: Callable[[], T], times: int) -> tuple[T, dict[str, Any]]:
        self.meet()
        sent, spent, start = bytes_and_packets(), cpu_sec(), time.perf_counter()
        for _ in range(times - 1):
            work()
        result = work()
        seconds, spent = (time.perf_counter() - start) / times, (cpu_sec() - spent) / times
        time.sleep(SETTLE_SEC)
        now = bytes_and_packets()
        self.meet()
        return result, {
            "phase": name,
            "ranks": self.size,
            "bytes": round((now[0] - sent[0]) / times),
            "packets": round((now[1] - sent[1]) / times),
            "seconds": round(seconds, 4),
            "cpu_sec": round(spent, 4),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }


def bytes_and_packets() -> tuple[int, int]:
    """What has been sent on the loopback of this network."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    columns = next(line for line in lines if line.strip().startswith("lo:")).split()
    return int(columns[1]), int(columns[2])


def cpu_sec() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- jobs -----------------------------------------------------------------------------------------


def agree(meter: Meter, tensors: int, folder: str) -> None:
    """Open the ranks' connections, and agree."""

    def open_them() -> Any:
        with open_ranks(call="scale()") as ranks:
            return ranks

    ranks = meter.phase("open", open_them)
    meter.phase("agreement", lambda: ranks.run("agreeing", lambda: None), STEPS)
    meter.phase("reduce", lambda: ranks.reduce("agreeing", meter.rank, max), STEPS)


def make_parts(meter: Meter, tensors: int, rows: int) -> nn.Module:
    """A model of DTensors made by `from_local`, for which torch itself sends nothing."""
    mesh, model = init_device_mesh("cpu", (meter.size,)), nn.Module()
    local = torch.zeros(rows, 4).chunk(meter.size)
    for index in range(tensors):
        own = local[meter.rank].clone() if meter.rank < len(local) else torch.zeros(0, 4)
        tensor = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 4)), stride=(4, 1)
        )
        model.register_parameter(f"weight_{index}", nn.Parameter(tensor))
    return model


def run_parts(meter: Meter, tensors: int, folder: str) -> None:
    """Save such a model with its optimizer, unless other ranks have; resume it, and load the model;
    compare values.
    """
    rows = 1024
    whole = torch.arange(rows * 4.0).view(rows, 4).chunk(meter.size)
    expected = whole[meter.rank] if meter.rank < len(whole) else torch.zeros(0, 4)

    def make(fill: bool) -> tuple[nn.Module, torch.optim.Optimizer, anyrank.TrainState]:
        model = make_parts(meter, tensors, rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        if fill:
            for index, parameter in enumerate(model.parameters()):
                part: Any = parameter.detach()
                part.to_local().copy_(expected + index)
                parameter.grad = part.clone()
            optimizer.step()
        return model, optimizer, anyrank.TrainState(model, optimizer)

    if not os.path.exists(f"{folder}/run"):
        _, _, state = make(fill=True)
        run = anyrank.Checkpoints(f"{folder}/run", state, every=10**9)
        meter.phase("resume of an empty folder", lambda: (run.__enter__(), run.resume()))
        run.step_done()
        meter.phase("save, first", run.save)
        run.step_done()
        meter.phase("save", run.save)
        run.close()
    model, optimizer, state = make(fill=False)

    def resume() -> None:
        with anyrank.Checkpoints(f"{folder}/run", state, every=10**9) as other:
            report = other.resume()
            assert report is not None
            assert report.step == 2

    meter.phase("resume", resume)
    for index, parameter in enumerate(model.parameters()):
        value: Any = parameter.detach()
        momentum: Any = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum.to_local(), expected + index)
        assert torch.equal(value.to_local(), (expected + index) * 0.5)
    loaded = make_parts(meter, tensors, rows)
    meter.phase("load of the run", lambda: anyrank.load(loaded, f"{folder}/run"))
    for index, parameter in enumerate(loaded.parameters()):
        value = parameter.detach()
        assert torch.equal(value.to_local(), (expected + index) * 0.5)


def load_parts(meter: Meter, tensors: int, folder: str) -> None:
    """Load into DTensors made by `from_local`, and take steps."""
    rows = max(meter.size, 64) // meter.size * meter.size
    model = make_parts(meter, tensors, rows)
    source = {
        name: torch.full(p.shape, float(index))
        for index, (name, p) in enumerate(model.named_parameters())
    }
    meter.phase("load, first", lambda: anyrank.load(model, source))
    meter.least("load", lambda: anyrank.load(model, source))
    for index, parameter in enumerate(model.parameters()):
        held: Any = parameter
        assert held.to_local().eq(index).all()
    loader = anyrank.ElasticLoader(
        torch.zeros(meter.size * 16, 1), global_batch=meter.size * 2, microbatch=2
    )
    small = nn.Linear(1, 1).requires_grad_(False)
    state = anyrank.TrainState(small, data=loader)
    run = anyrank.Checkpoints(f"{folder}/run", state, every=10**9)
    steps = iter(loader)
    meter.phase("resume of an empty folder", lambda: (run.__enter__(), run.resume()))

    def step() -> None:
        for _ in next(steps).microbatches(small):
            pass
        run.step_done()

    meter.phase("step, first", step)
    meter.least("step", step)
    run.close()


def train(meter: Meter, tensors: int, folder: str, kinds: Sequence[str]) -> None:
    """FSDP2 and AdamW: plain steps, DCP, anyrank."""
    torch.manual_seed(0)
    model = Net(tensors)
    meter.phase("fully_shard", lambda: fully_shard(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def plain() -> None:
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    meter.phase("plain step, first", plain)
    meter.phase("plain step", plain, STEPS)
    if "dcp" in kinds:

        def states() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        for name in ("dcp.save, first", "dcp.save"):
            meter.phase(name, lambda: dcp.save(states(), checkpoint_id=f"{folder}/dcp"))
        meter.phase("dcp.load", lambda: dcp.load(states(), checkpoint_id=f"{folder}/dcp"))
    for name in ("load, first", "load") if "load" in kinds else ():
        meter.phase(name, lambda: anyrank.load(model, f"{folder}/weights.safetensors"))
    if "run" in kinds:
        run_steps(meter, tensors, folder, model, optimizer)


def new_run(
    meter: Meter, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[anyrank.Checkpoints, Any]:
    """A run that never saves by itself, and its steps."""
    loader = anyrank.ElasticLoader(
        torch.randn(meter.size * 64, 16), global_batch=meter.size * 2, microbatch=2
    )
    state = anyrank.TrainState(model, optimizer, data=loader)
    return anyrank.Checkpoints(f"{folder}/run", state, every=10**9), iter(loader)


def run_steps(
    meter: Meter, tensors: int, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Steps, saves and a resume of a run."""
    run, steps = new_run(meter, folder, model, optimizer)
    meter.phase("resume of an empty folder", lambda: (run.__enter__(), run.resume()))

    def step() -> None:
        this = next(steps)
        for batch in this.microbatches(model):
            this.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        run.step_done()

    meter.phase("step, first", step)
    meter.phase("step, second", step)
    meter.phase("step", step, STEPS)
    meter.phase("save, first", run.save)
    meter.phase("step after a save", step)
    meter.phase("save", run.save)
    run.close()

    def resume() -> None:
        other_model = Net(tensors)
        fully_shard(other_model)
        other_optimizer = torch.optim.AdamW(other_model.parameters(), lr=1e-3)
        other, _ = new_run(meter, folder, other_model, other_optimizer)
        with other:
            other.resume()

    meter.phase("new model and resume", resume)


JOBS: dict[str, Callable[[Meter, int, str], None]] = {
    "agree": agree,
    "parts": load_parts,
    "runs": run_parts,
    "load": partial(train, kinds=["load"]),
    "steps": partial(train, kinds=["load", "run"]),
    "beside": partial(train, kinds=["dcp", "load", "run"]),
}


# -- ranks ----------------------------------------------------------------------------------------


def warm_up() -> None:
    """Import and run what ranks need: a child that imports pays a second of CPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    get_state_dict(model, ())
    dist.destroy_process_group()
    anyrank.load(nn.Linear(2, 2), nn.Linear(2, 2).state_dict())


def rank_main(rank: int, job: str, size: int, tensors: int, folder: str) -> None:
    """What a forked process does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    meter = Meter(rank, size)
    JOBS[job](meter, tensors, folder)
    meter.meet()
    time.sleep(0 if rank else 1)  # the first rank has the store


def main() -> int:
    """Fork the ranks, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--job", choices=JOBS, default="beside")
    parser.add_argument("--folder", help="of the files, which stay; else one of its own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder or tempfile.mkdtemp(prefix="anyrank-scale-")
    warm_up()
    torch.manual_seed(0)
    weights = {
        key: torch.randn_like(value) for key, value in Net(options.tensors).state_dict().items()
    }
    save_file(weights, f"{folder}/weights.safetensors")
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
        WORLD_SIZE=str(options.ranks),
        ANYRANK_TIMEOUT_SEC=str(max(600, 10 * options.ranks)),  # many ranks on few cores
        TORCH_GLOO_LAZY_INIT="1",  # torch's default group, whose mesh is not what is measured
    )
    children = list[int]()
    for rank in range(options.ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(rank, options.job, options.ranks, options.tensors, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
