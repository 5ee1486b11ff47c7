"""Two ranks, a simulated device each: loads, resumes and tiles, with collectives on the device."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.ranks.exact_runs import sha256
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import anyrank
from anyrank.live import device_channel
from anyrank.loading.sharing import move
from anyrank.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.sim]
WIDTH = 128
CPU = torch.device("cpu")
STRATEGIES: tuple[Literal["own", "stripe", "scatter"], ...] = ("own", "stripe", "scatter")
ENV = {"ANYRANK_READ_THREADS": "2"}


def job(path: str, kind: str, *args: Any) -> Any:
    """Run a job of two ranks on the simulated device; what it returns, and its races."""
    import tests.device.sim  # noqa: F401 - before anything asks for an accelerator

    simulated: Any = torch.get_device_module("sim")
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    store = dist.FileStore(f"{path}/store-{kind}-{'-'.join(map(str, args))}", 2)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=rank, world_size=2)
    try:
        result = JOBS[kind](path, torch.device("sim", rank), *args)
    finally:
        dist.destroy_process_group()
    simulated.synchronize(rank)
    return result, simulated.races(), simulated.used_devices()


def build(device: torch.device, wrap: str) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
    if wrap == "ddp":
        return DistributedDataParallel(net.to(device), device_ids=[device.index])
    if wrap == "plain":
        return net.to(device)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if wrap == "offloaded" else {}
    net = net if options else net.to(device)
    for layer in (net[0], net[2]):
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def train(net: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    losses: list[float] = []
    for _ in range(3):
        loss = net(torch.ones(4, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load(path: str, device: torch.device, wrap: str, strategy: Any) -> Any:
    if wrap == "ddp":
        net = build(device, wrap)
    else:
        with anyrank.meta():
            net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
        for layer in net:
            fully_shard(layer, **(options if wrap == "offloaded" else {}))
    tensors = {
        name: torch.full_like(value, n + 1, device="cpu")
        for n, (name, value) in enumerate(sizes(net).items())
    }
    if device.index == 0:
        save_file(tensors, f"{path}/w.safetensors")
    dist.barrier()
    anyrank.load(net, f"{path}/w.safetensors", strategy=strategy, verify=True, buffer_bytes=1 << 17)
    inner = net.module if wrap == "ddp" else net
    net(torch.randn(2, WIDTH, device=device)).sum().backward()
    grads = {getattr(p.grad, "_local_tensor", p.grad).device.type for p in net.parameters()}
    whole = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in inner.state_dict().items()}
    return grads, all(torch.equal(v.cpu(), tensors[n]) for n, v in whole.items())


def misplaced(path: str, device: torch.device) -> Any:
    torch.accelerator.set_device_index(0)  # as where the script forgets it
    with anyrank.meta():
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fully_shard(net)
    torch.accelerator.set_device_index(device.index)
    if device.index == 0:
        save_file({n: torch.ones_like(v, device="cpu") for n, v in sizes(net).items()}, f"{path}/w")
    dist.barrier()
    calls = [
        partial(anyrank.load, net, f"{path}/w", strategy=one, buffer_bytes=1 << 14)
        for one in STRATEGIES
    ]
    errors: list[str] = []
    for call in (*calls, partial(anyrank.materialize, net)):
        with pytest.raises(anyrank.LoadError) as caught:
            call()
        errors.append(str(caught.value))
    return errors, all(p.is_meta for p in net.parameters())


def sizes(net: Any) -> dict[str, torch.Tensor]:
    inner = getattr(net, "module", net)
    return {n: torch.empty(v.shape, dtype=v.dtype) for n, v in inner.state_dict().items()}


def resume(path: str, device: torch.device, wrap: str, background: bool) -> Any:
    net = build(device, wrap)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = anyrank.TrainState(net, optimizer)
    train(net, optimizer, device)
    folder = f"{path}/{wrap}"
    with closing(anyrank.Checkpoints(folder, state, background=background)) as ckpts:
        ckpts.step_done()
        ckpts.save()
        expected = train(net, optimizer, device)
        ckpts.wait()
    fresh = build(device, wrap)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    with anyrank.Checkpoints(folder, anyrank.TrainState(fresh, again)) as ckpts:
        report = ckpts.resume("must")
    assert report is not None
    places = [
        {k: getattr(v, "_local_tensor", v).device.type for k, v in one.items()}
        for one in (*optimizer.state.values(), *again.state.values())
    ]
    assert places.count(places[0]) == len(places)
    return set(report.components.values()), train(fresh, again, device) == expected


def sync(path: str, device: torch.device, wrap: str, meta: bool) -> Any:
    """From FSDP2, on devices or kept on the CPU, into a whole bfloat16 copy on rank 1's device."""
    src: Any = build(device, wrap)
    dst: Any = None
    if device.index == 1:
        with anyrank.meta() if meta else nullcontext():
            dst = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            dst = dst.bfloat16()
        dst = dst if meta else dst.to(device)
        if not meta:
            dst[0].weight.data.fill_(7)  # still under way when the call begins
    report = anyrank.sync(dst, src, verify=True)
    whole = {name: p.full_tensor().cpu() for name, p in src.named_parameters()}
    right = all(
        torch.equal(p.cpu(), whole[name].bfloat16()) and p.device == device
        for name, p in (dst.named_parameters() if dst is not None else ())
    )
    return right, report.bytes_sent[1], report.is_planned


def window(path: str, device: torch.device) -> Any:
    """Several times the window, whose memory goes round while a device fills and empties it."""
    src: Any = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(device)
    for number, layer in enumerate(src):
        layer.weight.data.copy_(torch.arange(float(1 << 20), device=device).view(1024, 1024))
        layer.weight.data.mul_(number + 1)
    dst = [torch.zeros(1024, 1024, device=device) for _ in src]
    pinned: list[bool] = []
    usual = move.page_locked

    def page_locked(nbytes: int, of: torch.device) -> torch.Tensor:
        made = usual(nbytes, of)
        pinned.append(made.is_pinned() and nbytes == 4 << 20)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move, "page_locked", page_locked)
        taker = {f"{n}.weight": tensor for n, tensor in enumerate(dst)} if device.index else None
        report = anyrank.sync(taker, None if device.index else src)
    right = all(torch.equal(a, b.weight) for a, b in zip(dst, src, strict=True))
    return pinned, right or not device.index, report.bytes_sent


def channel(path: str, device: torch.device, kind: str) -> Any:
    """From device to device by rounds on a group of simccl's own, behind what is under way."""
    from tests.device.sim import _C

    if kind == "misplaced":
        torch.accelerator.set_device_index(0)  # as where the script forgets it
        torch.get_device_module("sim").used_devices(clear=True)
    rounds: list[int] = []

    class Counted:
        def __init__(self, store: Any, *shape: int) -> None:
            gloo = dist.ProcessGroupGloo(store, *shape, timedelta(seconds=60))
            self.group = _C.make_backend(gloo, *shape)

        def alltoall_base(self, target: torch.Tensor, source: torch.Tensor, *splits: Any) -> Any:
            assert target.device == source.device == device
            rounds.append(len(rounds))
            return self.group.alltoall_base(target, source, *splits)

        def abort(self) -> None:
            self.group.abort()

    wanted = [torch.randn(96, 64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    names = [f"t{n}" for n in range(3)]
    src: Any = None
    dst: Any = None
    if device.index == 0:
        src = {name: w.to(device).t() for name, w in zip(names, wanted, strict=True)}
        for tensor in src.values():
            tensor.mul_(2)  # still under way when the call begins
    else:
        dst = {name: torch.ones(64, 96, device=device).bfloat16() for name in names}
        dst["t0"].mul_(7)
    calls = device_channel.ChannelKind("simccl", Counted, 0, 4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_channel, "choose_channel", lambda devices: calls)
        weights = anyrank.Sync(dst, src, verify=kind == "verify", atomic=kind == "atomic")
        reports = [weights() for _ in range(2)]
    right = all(
        torch.equal(tensor.cpu(), (w.t() * 2).bfloat16())
        for tensor, w in zip((dst or {}).values(), wanted, strict=dst is not None)
    )
    return right, len(rounds), reports[1].channel, reports[1].channel_bytes, reports[1].bytes_sent


class Reads(TorchDispatchMode):
    """Counts the host's waits for a value on the device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default and not args[0].is_cpu
        self.num += func is torch.ops.aten._to_copy.default and kwargs.get("device") == CPU
        return func(*args, **kwargs or {})


def tiled(path: str, device: torch.device) -> Any:
    """A tensor-parallel MLP in tiles: what the host waits for, and whether it is the plain one."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    mesh = init_device_mesh("sim", (2,))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.randn(4, 8, device=device)
    plain = net(x)
    parallelize_module(net, mesh, plan)
    anyrank.tile_(net, "", chunk_size=2, dim=0)
    agreements = Mock(wraps=dist.all_reduce)
    with Reads() as reads, patch.object(dist, "all_reduce", agreements):
        tiles = net(x)
    return reads.num + agreements.call_count, torch.allclose(tiles, plain, atol=1e-6)


def exact(path: str, device: torch.device) -> dict[str, str]:
    """SHA-256 of a run on both ranks, under each wrapper, and of each rank's own run."""
    torch.use_deterministic_algorithms(True)
    alone = [dist.new_group([rank]) for rank in range(2)][device.index]
    rows = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))
    found: dict[str, str] = {}
    for wrap, group in {"ddp": None, "fsdp": None, "plain": alone}.items():
        net = build(device, wrap)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = anyrank.ElasticLoader(
            rows, global_batch=12, microbatch=2, process_group=group, exact=True
        )
        for step in loader:
            for batch in step.microbatches(net):
                step.backward(net(batch.to(device)).square().mean())
            step.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        found[wrap] = sha256(net, optimizer)
    torch.use_deterministic_algorithms(False)
    return found


JOBS: dict[str, Any] = {
    "channel": channel,
    "load": load,
    "misplaced": misplaced,
    "resume": resume,
    "sync": sync,
    "tiled": tiled,
    "exact": exact,
    "window": window,
}


def on_two_ranks(path: Path, kind: str, *args: Any) -> list[Any]:
    results = run_ranks(2, job, str(path), kind, *args, init=False, env=ENV)
    assert [races for _, races, _ in results] == [[], []]
    assert [used for _, _, used in results] == [{0}, {1}]
    return [result for result, _, _ in results]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "offloaded"])
def test_ranks_load_onto_their_devices(tmp_path: Path, wrap: str, strategy: str) -> None:
    wanted = ({"cpu" if wrap == "offloaded" else "sim"}, True)
    assert on_two_ranks(tmp_path, "load", wrap, strategy) == [wanted, wanted]


def test_a_unit_that_computes_on_another_ranks_device_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, job, str(tmp_path), "misplaced", init=False, env=ENV)
    assert first[0] == second[0]
    errors, on_meta = first[0]
    assert on_meta
    assert len(errors) == 4
    for error in errors:
        assert "0.weight: fully_shard was called while sim:0 was the current device" in error
        assert "this rank's device is sim:1. Call torch.accelerator.set_device_index(1)" in error


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("wrap", ["fsdp", "offloaded"])
def test_live_weights_go_between_devices(tmp_path: Path, wrap: str, meta: bool) -> None:
    assert on_two_ranks(tmp_path, "sync", wrap, meta) == [(True, 0, True)] * 2


@pytest.mark.parametrize("kind", ["", "verify", "atomic", "misplaced"])
def test_the_channel_from_device_to_device(tmp_path: Path, kind: str) -> None:
    """3 x 12 KiB in rounds of 21 rows: twelve in each call, and one that connects."""
    wanted = (True, 25, "simccl", [8064, 8064], [36864, 0])
    assert on_two_ranks(tmp_path, "channel", kind) == [wanted, wanted]


def test_a_window_of_page_locked_memory_goes_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "ANYRANK_BUFFER_BYTES", str(4 << 20))
    wanted = ([True], True, [16 << 20, 0])
    assert on_two_ranks(tmp_path, "window") == [wanted, wanted]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "offloaded"])
def test_ranks_go_on_bit_by_bit(tmp_path: Path, wrap: str, background: bool) -> None:
    assert on_two_ranks(tmp_path, "resume", wrap, background) == [({"exact"}, True)] * 2


def test_promise_9_ranks_with_devices_have_the_bits_of_one(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, "exact")
    assert first == second
    assert len({*first.values()}) == 1, first


def test_tiles_under_tensor_parallelism_do_not_wait_for_the_device(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, "tiled") == [(0, True)] * 2
