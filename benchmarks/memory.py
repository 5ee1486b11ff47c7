"""Tiles and tiled loss beside their peers: live bytes, runs of the layer and time.

    python benchmarks/memory.py              # some minutes; results/memory.json
    python benchmarks/memory.py --quick      # small, nothing is written

Bytes are those of live storages at the highest point of a forward and backward pass, by a dispatch
mode that follows every storage from the operation that makes it to its end, on fake tensors of the
full size. Under such a mode autograd sums gradients into new tensors where it would otherwise add
in place, so most ways of the MLP are measured by the allocator's own events, 16 times smaller in
each dim, and in float32, as the CPU's kernels take scratch memory of their own for bfloat16. Time
is that of a smaller case on one rank; contenders take turns. Host time is that of 16 tiles of 4
tokens, whose products take next to none. On a device the timed cases also have its peaks, and so
has offloading.

More packages are compared where they are installed:

    pip install --no-deps deepspeed hjson py-cpuinfo ninja msgpack einops liger-kernel triton
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import bench
import torch
import torch.nn.functional as F
from bench import MIB, Case, Run, Runs, goal, median, ratios, tell
from launch import Launcher, device, timed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import anyrank

BF16 = torch.bfloat16
SUM_IN_FP32 = ("anyrank.tile, grad_dtype",)  # by operations of its own, so `Live` sees it as it is
TOKENS, HIDDEN, INNER, VOCAB = 65536, 4096, 14336, 128256


# -- the ways -------------------------------------------------------------------------------------

Tiled = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """As the large language models have it."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += x.numel() // x.shape[-1]  # some pass them without a batch dim
        return self.down(F.silu(self.gate(x)) * self.up(x))


def deepspeed_tiles(module: nn.Module, chunk: int) -> Tiled:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    weights = list(module.parameters())
    return lambda x: TiledMLP.apply(call, module, x, x.shape[1] // chunk, weights)


def liger_tiles(module: nn.Module, chunk: int) -> Tiled:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    return lambda x: apply_tiled_mlp(call, module, x, x.shape[1] // chunk)


def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def torch_tiles(module: nn.Module, chunk: int) -> Tiled:
    region = functools.partial(checkpoint, module, use_reentrant=False)
    return lambda x: torch.cat([region(part) for part in x.split(chunk, 1)], 1)


MLPS: dict[str, Callable[[Any, int], Tiled]] = {
    "plain": lambda module, chunk: module,
    "torch checkpoint per tile": torch_tiles,
    "anyrank.tile": lambda module, chunk: anyrank.tile(module, chunk_size=chunk),
    "anyrank.tile, grad_dtype": lambda module, chunk: anyrank.tile(
        module, chunk_size=chunk, grad_dtype=torch.float32
    ),
}
if importlib.util.find_spec("deepspeed"):
    MLPS["DeepSpeed TiledMLP"] = deepspeed_tiles
if importlib.util.find_spec("liger_kernel"):
    MLPS["Liger tiled_mlp"] = liger_tiles


def full_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden), labels)


def chunked_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(h), y, reduction="sum")

    parts = zip(hidden.split(1024), labels.split(1024), strict=True)
    return sum(checkpoint(part, h, y, use_reentrant=False) for h, y in parts) / len(labels)


def torch_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, head.weight, labels, options=options)


def recomputed_loss(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return anyrank.tiled_loss(nn.Sequential(head), hidden, labels)


LOSSES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all logits": full_loss,
    "torch checkpoint per tile": chunked_loss,
    "anyrank.tiled_loss": anyrank.tiled_loss,
    "anyrank.tiled_loss, recompute": recomputed_loss,
}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["torch linear_cross_entropy"] = torch_loss


# -- bytes ----------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and their highest sum."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in known:
            self.sizes[id(tensor.untyped_storage())] = 0  # there before: not counted

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.sizes:
            self.sizes[id(storage)] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, id(storage)).atexit = False

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result


# -- the tiled MLP --------------------------------------------------------------------------------


def mlp_case(
    way: str, tokens: int, hidden: int, inner: int, tiles: int, dtype: torch.dtype = BF16
) -> Callable[[], Any]:
    """A step of an MLP, with its tensors as `known`."""
    with device():
        module = Mlp(hidden, inner, dtype)
        x = torch.randn(1, tokens, hidden, dtype=dtype, requires_grad=True)
        upstream = torch.randn(1, tokens, hidden, dtype=dtype)
    call = MLPS[way](module, tokens // tiles)

    def step() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        call(x).backward(upstream)

    step.known = [x, upstream, *module.parameters()]
    return step


def live_mib(make: Callable[[], Any], floor: int) -> int:
    """Highest live bytes over the floor, in MiB, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = make()
        with Live(step.known) as live:
            step()
    return round((live.peak - floor) / MIB)


def allocated_mib(make: Callable[[], Any], floor: int, scale: int) -> int:
    """The same by the allocator's events on real tensors, of a case that is smaller by `scale`."""
    step = make()
    step()
    for tensor in step.known:
        tensor.grad = None
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        # Random states are of one size in every case: they would be scaled up.
        now += event.nbytes() if abs(event.nbytes()) != torch.get_rng_state().numel() else 0
        peak = max(peak, now)
    return round((peak * scale - floor) / MIB)


def mlp_bytes() -> list[Run]:
    """Bytes of every way, by number of tiles."""
    floor = 2 * (2 * TOKENS * HIDDEN + 3 * HIDDEN * INNER)

    def measure_way(way: str, tiles: int) -> Run:
        if way in SUM_IN_FP32:
            full = functools.partial(mlp_case, way, TOKENS, HIDDEN, INNER, tiles)
            return {"mib": live_mib(full, floor)}
        sizes = (TOKENS // 16, HIDDEN // 16, INNER // 16, tiles, torch.float32)
        small = functools.partial(mlp_case, way, *sizes)
        return {"mib": allocated_mib(small, floor, 16 * 16 // 2)}

    rows: list[Run] = []
    for tiles in (16, 32, 64):
        found = Case(
            f"mlp, {tiles} tiles", MLPS, lambda way, _, n=tiles: measure_way(way, n)
        ).once()
        rows += [{"way": way, "tiles": tiles, **figures} for way, figures in found.items()]
    return rows


def nested_calls() -> dict[str, float]:
    """How often a token goes through the MLP in a step, inside of a recomputed block."""

    def count(way: str, _: int) -> Run:
        module = Mlp(16, 24)
        block = MLPS[way](module, 8)
        x = torch.randn(1, 64, 16, dtype=BF16, requires_grad=True)
        checkpoint(lambda x: x + block(F.silu(x)), x, use_reentrant=False).sum().backward()
        return {"calls": module.rows / 64}

    return {way: run["calls"] for way, run in Case("block", MLPS, count).once().items()}


# -- the loss -------------------------------------------------------------------------------------


def loss_case(way: str, tokens: int, hidden_size: int, vocab: int, dtype: Any) -> Callable[[], Any]:
    """A step of a loss, with its tensors as `known`."""
    with device():
        head = nn.Linear(hidden_size, vocab, bias=False, dtype=dtype)
        hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
        labels = torch.randint(vocab, (tokens,))

    def step() -> None:
        hidden.grad = head.weight.grad = None
        LOSSES[way](head, hidden, labels).backward()

    step.known = [hidden, labels, head.weight]
    return step


def loss_bytes() -> list[Run]:
    """Live bytes of every way, by number of tokens."""

    def measure_way(way: str, tokens: int) -> Run:
        make = functools.partial(loss_case, way, tokens, HIDDEN, VOCAB, BF16)
        try:
            return {"mib": live_mib(make, 2 * (tokens * HIDDEN + HIDDEN * VOCAB))}
        except RuntimeError as error:  # some operations have no fake form
            return {"mib": str(error).splitlines()[0][:120]}

    rows: list[Run] = []
    for tokens in (4096, 65536):
        found = Case(f"loss, {tokens}", LOSSES, lambda way, _, n=tokens: measure_way(way, n)).once()
        rows += [{"way": way, "tokens": tokens, **figures} for way, figures in found.items()]
    return rows


# -- time -----------------------------------------------------------------------------------------


def offload_case(way: str, tokens: int, width: int) -> Callable[[], Any]:
    """A step of eight blocks, whose activations are kept, recomputed, or kept on the host."""
    blocks = (Mlp(width, 4 * width, torch.float32) for _ in range(8))
    net, x = nn.Sequential(*blocks).to(device()), torch.randn(1, tokens, width, device=device())
    x.requires_grad_()
    if way != "plain":
        offload = anyrank.Offload(1 << 30) if way == "recompute and offload" else None
        anyrank.recompute_(net, "*", offload=offload)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return step


OFFLOADS = ("plain", "recompute", "recompute and offload")


def make_steps(what: str, shrink: int) -> dict[str, Callable[[], Any]]:
    """The steps that are timed in turn."""
    if what == "mlp_time":
        return {way: mlp_case(way, 4096 // shrink, 512, 1536, 8) for way in MLPS}
    if what == "host_time":  # beside torch's checkpoints
        tiled = [way for way in MLPS if way != "plain"]
        return {way: mlp_case(way, 64, 16, 24, 16, torch.float32) for way in tiled}
    if what == "offload":
        return {way: offload_case(way, 4096 // shrink, 2048 // shrink) for way in OFFLOADS}
    sizes = (4096 // shrink, 256, 16384 // shrink, torch.float32)
    return {way: loss_case(way, *sizes) for way in LOSSES}


def time_steps(what: str, shrink: int, repeats: int) -> Runs:
    """The job of one rank: the ways in turn."""
    warnings.simplefilter("ignore")
    steps = make_steps(what, shrink)
    job = Case(what, steps, lambda way, _: timed(steps[way]))
    return job.run(repeats, warm=1, is_told=False)


def times(launcher: Launcher, what: str, shrink: int, repeats: int) -> list[Run]:
    """Seconds of each way, and ratios to the first one of the same turn."""
    (runs,) = launcher.values(1, time_steps, what, shrink, repeats)
    first = next(iter(runs.values()))
    rows: list[Run] = []
    for way, taken in runs.items():
        row: Run = {"way": way, "n": repeats, "sec": round(median(taken, "seconds"), 4)}
        if "peak_bytes" in taken[0]:
            row["peak_mib"] = round(median(taken, "peak_bytes") / MIB, 1)
        rows.append(row | {"ratio": ratios(taken, first, "seconds")})
        tell(what, rows[-1])
    return rows


def timed_tables(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Tables of times; on a device that of offloading, too."""
    on_device: Run = {"offload": options.repeats} if launcher.kind != "cpu" else {}
    wanted = {"mlp_time": options.repeats, "host_time": 10 * options.repeats}
    wanted |= {"loss_time": options.repeats} | on_device
    return {what: times(launcher, what, options.shrink, n) for what, n in wanted.items()}


def goals_of(result: Run) -> list[Run]:
    """What was to be reached, and whether it was."""
    mlp = {(row["way"], row["tiles"]): row["mib"] for row in result["mlp"]}
    loss = {(row["way"], row["tokens"]): row["mib"] for row in result["loss"]}
    mlp_time = {row["way"]: row["ratio"]["median"] for row in result["mlp_time"]}
    host = {row["way"]: row["ratio"]["median"] for row in result["host_time"]}
    loss_time = {row["way"]: row["ratio"]["median"] for row in result["loss_time"]}
    wanted: list[tuple[str, float, float]] = [
        ("tiled MLP, 64 tiles, MiB", mlp["anyrank.tile", 64], 260),
        ("tiled MLP, 32 tiles, MiB", mlp["anyrank.tile", 32], 500),
        ("tiled MLP, 16 tiles, MiB", mlp["anyrank.tile", 16], 500),
        ("tiled MLP, time of plain", mlp_time["anyrank.tile"], 1.35),
        ("tiled MLP, host time of torch's checkpoints", host["anyrank.tile"], 1.3),
        ("calls in a recomputed block", result["nested_calls"]["anyrank.tile"], 2),
        ("tiled loss, 4096 tokens, MiB", loss["anyrank.tiled_loss", 4096], 1050),
        ("tiled loss, 65536 tokens, MiB", loss["anyrank.tiled_loss", 65536], 1050),
        ("tiled loss, time of all logits", loss_time["anyrank.tiled_loss"], 1.05),
    ]
    if "torch linear_cross_entropy" in loss_time:
        best = loss_time["torch linear_cross_entropy"]
        wanted.append(("tiled loss, time of torch's", loss_time["anyrank.tiled_loss"] / best, 1.0))
    return [goal(what, round(value, 3), most) for what, value, most in wanted]


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Everything; the parts that take the time are smaller with --quick."""
    warnings.simplefilter("ignore")
    result: Run = {"mlp": mlp_bytes(), "nested_calls": nested_calls(), "loss": loss_bytes()}
    result |= timed_tables(options, launcher)
    return result | {"goals": goals_of(result)}


if __name__ == "__main__":
    bench.main("memory", measure, {"repeats": 2, "shrink": 4}, repeats=15, shrink=1)
