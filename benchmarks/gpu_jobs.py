"""What the ranks of `gpu.py` do: reads and loads of one rank, peaks of a Llama, a run that is
killed; and the scripts of ranks that hang, or are started again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import Case, Run, Runs, warm_memory
from exact import Tokens, fix_order, transformer
from launch import device, timed
from models import digest_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import anyrank

MADV_POPULATE_READ = 22  # Linux 5.14
SLOTS = 3  # of a reading thread
SLOT_BYTES = 2 << 20
MICROBATCH, GLOBAL_BATCH = 2, 16


# -- one rank: out of the page cache, onto the device ---------------------------------------------


def read_ways(path: str, threads: Sequence[int], repeats: int) -> Runs:
    """How fast bytes of a file get through page-locked memory onto the device, by whom."""
    nbytes = os.path.getsize(path)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device())
    locked = [torch.empty(SLOT_BYTES, dtype=torch.uint8).pin_memory() for _ in range(SLOTS)]
    slots = [locked] + [[slot.clone().pin_memory() for slot in locked] for _ in range(max(threads))]
    ways = {
        f"{name}, {count} threads": (fetch, count)
        for name, fetch in {"preadv": fetch_by_read, "mmap": fetch_mapped}.items()
        for count in threads
    }
    whole = torch.empty(min(nbytes, 1 << 30), dtype=torch.uint8).pin_memory()

    def once(way: str, number: int) -> Run:
        if way == "page-locked memory":
            table = timed(lambda: target[: len(whole)].copy_(whole, non_blocking=True))
            return {"gb_per_sec": len(whole) / 1e9 / table["seconds"]}
        fetch, count = ways[way]
        table = timed(lambda: copy_file(path, target, fetch, slots[:count]))
        return {"gb_per_sec": nbytes / 1e9 / table["seconds"]}

    return Case("read", ["page-locked memory", *ways], once).run(repeats, warm=1, is_told=False)


def copy_file(
    path: str, target: torch.Tensor, fetch: Callable[..., None], slots: list[list[torch.Tensor]]
) -> None:
    """A whole file onto the device, a thread for each list of slots, which it uses in turn."""
    descriptor, stream = os.open(path, os.O_RDONLY), torch.accelerator.current_stream(device())

    def copy(thread: int) -> None:
        torch.accelerator.set_stream(stream)
        busy: list[torch.Event | None] = [None] * SLOTS
        starts = range(thread * SLOT_BYTES, len(target), len(slots) * SLOT_BYTES)
        for number, start in enumerate(starts):
            which = number % SLOTS
            if (event := busy[which]) is not None:
                event.synchronize()
            stop = min(start + SLOT_BYTES, len(target))
            slot = slots[thread][which][: stop - start]
            fetch(descriptor, slot, start)
            target[start:stop].copy_(slot, non_blocking=True)
            busy[which] = stream.record_event()

    workers = [threading.Thread(target=copy, args=(number,)) for number in range(len(slots))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stream.synchronize()
    os.close(descriptor)


def fetch_by_read(descriptor: int, slot: torch.Tensor, start: int) -> None:
    """Fill a slot with a system call."""
    memory = (ctypes.c_char * len(slot)).from_address(slot.data_ptr())
    assert os.preadv(descriptor, [memory], start) == len(slot)


def fetch_mapped(descriptor: int, slot: torch.Tensor, start: int) -> None:
    """Fill a slot out of a mapping."""
    with mmap.mmap(descriptor, len(slot), access=mmap.ACCESS_COPY, offset=start) as memory:
        memory.madvise(MADV_POPULATE_READ)
        data = (ctypes.c_char * len(slot)).from_buffer(memory)
        ctypes.memmove(slot.data_ptr(), ctypes.addressof(data), len(slot))
        del data


def wide(width: int, layers: int) -> nn.Sequential:
    """Layers without biases in bf16."""
    options: Run = {"bias": False, "dtype": torch.bfloat16}
    return nn.Sequential(*(nn.Linear(width, 2 * width, **options) for _ in range(layers)))


def load_ways(folder: str, width: int, layers: int, threads: Sequence[int], repeats: int) -> Runs:
    """GB/s of one rank's loads of a file in the page cache."""
    names = {kind: f"{folder}/weights.{kind}" for kind in ("safetensors", "pt")}
    with torch.device(device()):
        values = {name: value.cpu() for name, value in wide(width, layers).state_dict().items()}
    save_file(values, names["safetensors"])
    torch.save(values, names["pt"])
    nbytes = sum(value.nbytes for value in values.values())
    del values

    def ours(kind: str, count: int = 0) -> None:
        os.environ.pop("ANYRANK_READ_THREADS", None)
        if count:
            os.environ["ANYRANK_READ_THREADS"] = str(count)
        with anyrank.meta():
            model = wide(width, layers)
        anyrank.load(model, names[kind])

    def by_dict() -> None:
        with torch.device(device()):
            model = wide(width, layers)
        model.load_state_dict(load_file(names["safetensors"]))

    def by_torch() -> None:
        tensors = torch.load(names["pt"], mmap=True)
        for name in tensors:
            tensors[name] = tensors[name].to(device())

    ways: dict[str, Callable[[], Any]] = {
        "anyrank.load": lambda: ours("safetensors"),
        "anyrank.load, .pt": lambda: ours("pt"),
        **{f"anyrank.load, {n} threads": lambda n=n: ours("safetensors", n) for n in threads},
        "load_file(device=)": lambda: load_file(names["safetensors"], device=str(device())),
        "load_file, load_state_dict": by_dict,
        "torch.load(mmap=True), to device": by_torch,
    }

    def once(way: str, number: int) -> Run:
        try:
            return {"gb_per_sec": nbytes / 1e9 / timed(ways[way])["seconds"]}
        except Exception as error:  # a library that does not know the device
            return {"refused": f"{type(error).__name__}: {error}"}

    return Case("load", ways, once).run(repeats, warm=1, is_told=False)


# -- one rank: peaks of a Llama -------------------------------------------------------------------


def offload_by_torch(model: Any) -> None:
    """Torch's own: blocks are recomputed, and what they keep of their inputs is on the host."""
    for layer in model.model.layers:
        layer.forward = offloaded(layer.forward)


def offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is recomputed, and keeps its inputs on the host."""

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)

    return run


def recompute_with_offload(model: Any) -> None:
    """Inputs of blocks on the host."""
    anyrank.recompute_(model, "model.layers.*", offload=anyrank.Offload(8 << 30))


def all_three(model: Any, tokens: int) -> None:
    """And MLPs in tiles."""
    recompute_with_offload(model)
    anyrank.tile_(model, "model.layers.*.mlp", chunk_size=tokens // 8, dim=-2)


PEAKS: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda model, tokens: None,
    "transformers, gradient_checkpointing_enable": lambda model, tokens: (
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ),
    "torch, checkpoint within save_on_cpu": lambda model, tokens: offload_by_torch(model),
    "anyrank.recompute_": lambda model, tokens: anyrank.recompute_(model, "model.layers.*"),
    "anyrank.recompute_ with Offload": lambda model, tokens: recompute_with_offload(model),
    "anyrank.recompute_ with Offload, and tile_": all_three,
}


def peak_of(way: str, sizes: Run, tokens: int, repeats: int) -> Run:
    """Peak and seconds of a step of a Llama in bf16, the head in tiles in all ways."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device()):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()
    inputs = torch.randint(sizes["vocab_size"], (1, tokens)).to(device())
    # What keeps no cache itself is told to: only transformers' own, and ours, have to know.
    given = {} if "anyrank" in way or "transformers" in way else {"use_cache": False}
    PEAKS[way](model, tokens)

    def step() -> None:
        model.zero_grad()
        hidden = model.model(input_ids=inputs, **given).last_hidden_state
        anyrank.tiled_loss(model.lm_head, hidden, inputs, chunk_size=tokens // 8).backward()

    step()
    tables = [timed(step) for _ in range(repeats)]
    return {
        "peak_mib": round(min(table["peak_bytes"] for table in tables) / (1 << 20)),
        "seconds": round(min(table["seconds"] for table in tables), 3),
    }


# -- several ranks: a run that is killed ----------------------------------------------------------


def go_on(kind: str, folder: str, until: int, kill_at: int) -> str:
    """Train to a step with exact=True, and say the SHA-256 of weights and moments; or the last rank
    is killed at a step, with no word to anybody.
    """
    fix_order(True)
    net = transformer(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    batches: Run = {"global_batch": GLOBAL_BATCH, "microbatch": MICROBATCH, "exact": True}
    loader = anyrank.ElasticLoader(Tokens(), **batches)
    state = anyrank.TrainState(net, optimizer, scheduler=schedule, data=loader)
    with anyrank.Checkpoints(folder, state, every=2, keep=3, background=True) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=until):
            for tokens in step.microbatches(net):
                batch = tokens.to(device())
                logits = net(batch)[:, :-1].flatten(0, 1).float()
                step.backward(nn.functional.cross_entropy(logits, batch[:, 1:].flatten()))
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if state.step >= kill_at > 0 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return digest_of(net, optimizer)


# -- scripts --------------------------------------------------------------------------------------

HANGS = {
    # way: what holds up the others, on which rank
    "skips": "rank 1 skips an all_reduce",
    "gathers": "rank 0 alone gathers",
    "sizes": "rank 1 reduces a tensor of another size",
    "loops": "rank 2 never leaves a loop of Python",
}
HANG = """
import os, sys, time
import launch
launch.join(os.environ[launch.KIND])
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import anyrank

way, rank = sys.argv[1], dist.get_rank()
anyrank.watch("5s", exit=True, report="out")
model = DistributedDataParallel(nn.Linear(256, 256).to(launch.device()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
small = torch.ones(1 + 65_792 * (rank == 1), device=launch.device())
parts = [torch.ones(8, device=launch.device()) for _ in range(dist.get_world_size())]
for number in range(10_000):
    model(torch.ones(8, 256, device=launch.device())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 20:
        if way == "skips" and rank != 1:
            dist.all_reduce(small[:1])  # HERE skips
        if way == "gathers" and rank == 0:
            dist.all_gather(parts, parts[0].clone())  # HERE gathers
        if way == "sizes":
            dist.all_reduce(small)  # HERE sizes
        while way == "loops" and rank == 2:
            time.sleep(0.1)  # HERE loops
    small[0].item()
"""
FIRST = """
import os, sys, time
import torch
if os.environ["ANYRANK_BENCH_DEVICE"] == "sim":
    import tests.device.sim
torch.ones(1, device=torch.accelerator.current_accelerator())
torch.accelerator.synchronize()
for number in range(2):
    start = time.perf_counter()
    import anyrank
    with anyrank.meta():
        model = torch.nn.Linear(64, 64)
    anyrank.load(model, sys.argv[1])
    torch.accelerator.synchronize()
    print(time.perf_counter() - start)
"""
RESTART = """
import os, signal, time
from pathlib import Path
import launch
launch.join(os.environ[launch.KIND])
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import anyrank

model = DistributedDataParallel(nn.Linear(1024, 1024).to(launch.device()))
optimizer = torch.optim.AdamW(model.parameters())
loader = anyrank.ElasticLoader(torch.ones(64, 1024), global_batch=8, microbatch=2)
state = anyrank.TrainState(model, optimizer, data=loader)
with anyrank.Checkpoints("run", state, every=1) as ckpts:
    is_first = ckpts.resume() is None
    for step in ckpts.steps(until=8):
        for batch in step.microbatches(model):
            step.backward(model(batch.to(launch.device())).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if not is_first and dist.get_rank() == 0:
            with Path("stepped").open("a") as file:
                print(time.time(), file=file)
        if is_first and state.step >= 3 and dist.get_rank() == 1:
            Path("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
"""


def lines_of(way: str) -> list[int]:
    """Where the script's culprit stands, or the ranks that wait for it."""
    lines = enumerate(HANG.splitlines(), 1)
    return [number for number, line in lines if f"# HERE {way}" in line]


def seconds_lost(folder: Path) -> float:
    """From the kill to the end of the next step."""
    killed = float((folder / "killed").read_text(encoding="utf-8"))
    stepped = (folder / "stepped").read_text(encoding="utf-8").splitlines()[0]
    return float(stepped) - killed


def file_of(folder: str, nbytes: int) -> str:
    """A file of random bytes, in the page cache."""
    warm_memory(nbytes)
    path, block = Path(folder, "bytes"), os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(nbytes >> 20):
            file.write(block)
    return str(path)
