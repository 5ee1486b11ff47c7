"""Tiles and tiled loss beside their peers: live bytes, runs of the layer and time.

    python benchmarks/memory.py              # some minutes; results/memory.json
    python benchmarks/memory.py --quick      # small, nothing is written

Bytes are those of live storages at the highest point of a forward and backward pass, by a dispatch
mode that follows every storage from the operation that makes it to its end, on fake tensors of the
full size; the same mode counts on a GPU. Under such a mode autograd sums gradients into new tensors
where it would otherwise add in place, so the MLP is measured a second time by the allocator's own
events, 16 times smaller in each dim, and in float32, as the CPU's kernels take scratch memory of
their own for bfloat16. Time is that of a smaller case on this CPU; contenders take turns. Host time
is that of 16 tiles of 4 tokens, whose products take next to none.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import bench
import torch
import torch.nn.functional as F
from bench import MIB, Case, Run, describe_machine, goal, median, ratios, tell
from memory_peers import BF16, LOSSES, MLPS, PACKAGES, Mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

SUM_IN_FP32 = ("anyrank.tile, grad_dtype",)  # by operations of its own, so `Live` sees it as it is
TOKENS, HIDDEN, INNER, VOCAB = 65536, 4096, 14336, 128256


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
    module = Mlp(hidden, inner, dtype)
    call = MLPS[way](module, tokens // tiles)
    x = torch.randn(1, tokens, hidden, dtype=dtype, requires_grad=True)
    upstream = torch.randn(1, tokens, hidden, dtype=dtype)

    def step() -> list[torch.Tensor]:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        call(x).backward(upstream)
        return [x, upstream, *module.parameters()]

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
    floor = 2 * (2 * TOKENS * HIDDEN + 3 * HIDDEN * INNER)
    rows: list[Run] = []
    for tiles in (16, 32, 64):
        for way in MLPS:
            full = functools.partial(mlp_case, way, TOKENS, HIDDEN, INNER, tiles)
            row: Run = {"way": way, "tiles": tiles, "live_mib": live_mib(full, floor)}
            if way not in SUM_IN_FP32:
                sizes = (TOKENS // 16, HIDDEN // 16, INNER // 16, tiles, torch.float32)
                small = functools.partial(mlp_case, way, *sizes)
                row["allocated_mib"] = allocated_mib(small, floor, 16 * 16 // 2)
            rows.append(row)
            tell("mlp", rows[-1])
    return rows


def nested_calls() -> dict[str, float]:
    """How often a token goes through the MLP in a step, inside of a recomputed block."""
    found: dict[str, float] = {}
    for way in MLPS:
        module = Mlp(16, 24)
        block = MLPS[way](module, 8)
        x = torch.randn(1, 64, 16, dtype=BF16, requires_grad=True)
        checkpoint(lambda x, b=block: x + b(F.silu(x)), x, use_reentrant=False).sum().backward()
        found[way] = module.rows / 64
    return found


# -- the loss -------------------------------------------------------------------------------------


def loss_case(way: str, tokens: int, hidden_size: int, vocab: int, dtype: Any) -> Callable[[], Any]:
    head = nn.Linear(hidden_size, vocab, bias=False, dtype=dtype)
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens,))

    def step() -> None:
        hidden.grad = head.weight.grad = None
        LOSSES[way](head, hidden, labels).backward()

    step.known = [hidden, labels, head.weight]
    return step


def loss_bytes() -> list[Run]:
    rows: list[Run] = []
    for tokens in (4096, 16384, 65536):
        for way in LOSSES:
            make = functools.partial(loss_case, way, tokens, HIDDEN, VOCAB, BF16)
            floor = 2 * (tokens * HIDDEN + HIDDEN * VOCAB)
            try:
                found = live_mib(make, floor)
            except RuntimeError as error:  # some operations have no fake form
                found = str(error).splitlines()[0][:120]
            rows.append({"way": way, "tokens": tokens, "live_mib": found})
            tell("loss", rows[-1])
    return rows


# -- time -----------------------------------------------------------------------------------------


def times(what: str, steps: dict[str, Callable[[], Any]], repeats: int) -> list[Run]:
    """Seconds of each, and ratios to the first one of the same turn."""

    def once(way: str, number: int) -> Run:
        start = time.perf_counter()
        steps[way]()
        return {"seconds": time.perf_counter() - start}

    runs = Case(what, steps, once).run(repeats, warm=1, is_told=False)
    first = next(iter(runs.values()))
    rows: list[Run] = []
    for way, taken in runs.items():
        row: Run = {"way": way, "n": repeats, "sec": round(median(taken, "seconds"), 4)}
        rows.append(row | {"ratio": ratios(taken, first, "seconds")})
        tell(what, rows[-1])
    return rows


def host_time(repeats: int) -> list[Run]:
    """Of 16 tiles whose products take next to none; beside torch's checkpoints."""
    tiled = [way for way in MLPS if way != "plain"]
    mlps = {way: mlp_case(way, 64, 16, 24, 16, torch.float32) for way in tiled}
    return times("mlp, host time", mlps, repeats)


def goals_of(result: Run) -> list[Run]:
    """What was to be reached, and whether it was."""
    mlp = {(row["way"], row["tiles"]): row for row in result["mlp"]}
    loss = {(row["way"], row["tokens"]): row["live_mib"] for row in result["loss"]}
    mlp_time = {row["way"]: row["ratio"]["median"] for row in result["mlp_time"]}
    host = {row["way"]: row["ratio"]["median"] for row in result["host_time"]}
    loss_time = {row["way"]: row["ratio"]["median"] for row in result["loss_time"]}
    wanted: list[tuple[str, float, float]] = [
        ("tiled MLP, 64 tiles, MiB", mlp["anyrank.tile", 64]["allocated_mib"], 260),
        ("tiled MLP, 32 tiles, MiB", mlp["anyrank.tile", 32]["allocated_mib"], 500),
        ("tiled MLP, 16 tiles, MiB", mlp["anyrank.tile", 16]["allocated_mib"], 500),
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


def measure(options: argparse.Namespace) -> Run:
    """Everything; the parts that take the time are smaller with --quick."""
    warnings.simplefilter("ignore")
    shrink = options.shrink
    result: Run = {"versions": describe_machine()["versions"] | bench.versions(PACKAGES)}
    result["mlp"] = mlp_bytes()
    result["nested_calls"] = nested_calls()
    tell("runs of the layer", result["nested_calls"])
    result["loss"] = loss_bytes()
    sizes = (4096 // shrink, 512, 1536, 8)
    mlps = {way: mlp_case(way, *sizes) for way in MLPS}
    result["mlp_time"] = times("mlp, time", mlps, options.repeats)
    result["host_time"] = host_time(10 * options.repeats)
    sizes = (4096 // shrink, 256, 16384 // shrink, torch.float32)
    losses = {way: loss_case(way, *sizes) for way in LOSSES}
    result["loss_time"] = times("loss, time", losses, options.repeats)
    return result | {"goals": goals_of(result)}


if __name__ == "__main__":
    bench.main("memory", measure, {"repeats": 2, "shrink": 4}, repeats=15, shrink=1)
