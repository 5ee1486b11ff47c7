"""Weights in wrappers of another class (float8 training): read, written and sent as plain."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests import wrapped
from tests.wrapped import Recipe, scaled, wrap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import anyrank
from anyrank.testing import run_ranks

PACKAGES = Path(sys.prefix) / "quantized"  # where `make` installs them, apart from all others
EAGER = {"TORCHDYNAMO_DISABLE": "1"}  # torchao compiles some steps, with threads that stay


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def sharded(seed: int) -> Any:
    return fully_shard(wrap(plain(seed)))


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    """The values of all ranks, without wrappers."""
    values: dict[str, torch.Tensor] = {}
    for name, value in net.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        local = local.held if isinstance(local, Recipe) else local
        if isinstance(value, DTensor):
            mesh, places = value.device_mesh, value.placements
            local = DTensor.from_local(
                local, mesh, places, shape=value.shape, stride=value.stride()
            ).full_tensor()
        values[name] = local.detach().clone()
    return values


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def still_wrapped(net: nn.Module) -> bool:
    weights = [p for p in net.parameters() if p.ndim == 2]
    locals_ = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
    return all(isinstance(local, Recipe) for local in locals_)


def job_run(folder: str) -> None:
    net = sharded(0)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with anyrank.Checkpoints(folder, anyrank.TrainState(net, optimizer)) as ckpts:
        ckpts.save()
    want = whole(net)
    other = sharded(1)
    state = anyrank.TrainState(other, torch.optim.AdamW(other.parameters()))
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume()
    assert report is not None
    assert report.components["model"] == "exact"
    assert_same(whole(other), want)
    assert still_wrapped(other)
    loaded = plain(2)
    anyrank.load(loaded, folder)
    assert_same(dict(loaded.state_dict()), want)


def test_a_run_is_saved_and_resumed(tmp_path: Any) -> None:
    run_ranks(2, job_run, str(tmp_path / "run"))


def job_stock(folder: str) -> None:
    source = sharded(0)
    dcp.state_dict_saver.save({"model": source.state_dict()}, checkpoint_id=folder)
    with torch.serialization.safe_globals([Recipe]):
        targets: list[Any] = [sharded(1), plain(1)]
        for target in targets:
            anyrank.load(target, folder)
            assert_same(whole(target), whole(source))


def job_places(folder: str, seed: int) -> None:
    source, want = sharded(0), whole(sharded(0))
    targets: list[Any] = [plain(1), sharded(1), wrap(plain(1)), fully_shard(plain(1))]
    for target in targets:
        anyrank.sync(target, source, verify=True)
        assert_same(whole(target), want)
    for target in (plain(1), sharded(1), wrap(plain(1))):
        anyrank.load(target, source.state_dict())
        assert_same(whole(target), want)
    anyrank.convert(source, f"{folder}/out.safetensors", overwrite=True)
    dist.barrier()
    assert_same(load_file(f"{folder}/out.safetensors"), want)
    for target in (sharded(1), wrap(plain(1))):
        anyrank.load(target, f"{folder}/out.safetensors", verify=True)
        assert_same(whole(target), want)
        assert still_wrapped(target)


def test_it_is_loaded_sent_and_converted(tmp_path: Any) -> None:
    run_ranks(2, job_places, str(tmp_path), 0)


def job_meta() -> None:
    values = dict(plain(0).state_dict())
    for build in (lambda: fully_shard(wrap(plain(1))), lambda: wrap(plain(1))):
        with anyrank.meta():
            net: Any = build()
        assert all(parameter.is_meta for parameter in net.parameters())
        optimizer = torch.optim.SGD(net.parameters())
        before = [id(parameter) for parameter in net.parameters()]
        anyrank.load(net, values)
        assert_same(whole(net), values)
        assert still_wrapped(net)
        assert before == [id(p) for p in optimizer.param_groups[0]["params"]]
        net(torch.ones(2, 6)).sum().backward()


def test_a_meta_model_keeps_its_wrappers() -> None:
    run_ranks(2, job_meta)


def job_tp() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole_value = torch.arange(16.0).view(4, 4)
    part = whole_value.chunk(2)[dist.get_rank()].clone()
    net: Any = nn.Linear(4, 4, bias=False)
    net.weight = nn.Parameter(DTensor.from_local(Recipe(torch.zeros(2, 4), "tp"), mesh, [Shard(0)]))
    anyrank.load(net, {"weight": whole_value})
    assert torch.equal(net.weight.to_local().held, part)


def test_tensor_parallel_parts_too() -> None:
    run_ranks(2, job_tp)


def job_computed(kind: str, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Module()
    local = scaled(getattr(wrapped, kind))
    net.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=False)
    errors: list[str] = []
    for call in (
        lambda: anyrank.load(net, {"weight": torch.ones(8, 4)}),
        lambda: anyrank.sync(nn.Linear(4, 8, bias=False), net),
        lambda: anyrank.convert(net, f"{folder}/{kind}.safetensors"),
        lambda: anyrank.plan(net, {"weight": torch.ones(8, 4)}),
    ):
        try:
            call()
            errors.append("none")
        except anyrank.AnyrankError as error:
            errors.append(str(error))
    return "\n".join(errors)


def test_parts_whose_values_are_computed_are_refused_by_name(tmp_path: Any) -> None:
    for kind in ("Scaled", "Pair"):
        for text in run_ranks(2, job_computed, kind, str(tmp_path)):
            assert text.count(f"is a {kind}, whose bytes are not") == 4, text


def test_a_folder_that_torch_wrote_of_them(tmp_path: Any) -> None:
    run_ranks(2, job_stock, str(tmp_path / "dcp"))


def job_torchao(folder: str) -> list[str]:
    sys.path.append(str(PACKAGES))  # on a rank of the pool, which sets it back
    float8 = importlib.import_module("torchao.float8")
    quantization = importlib.import_module("torchao.quantization")

    def trained(seed: int) -> Any:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return fully_shard(float8.convert_to_float8_training(net, config=config))

    def values(net: Any) -> torch.Tensor:
        return net[0].weight.to_local()._tensor

    net = trained(0)
    with anyrank.Checkpoints(f"{folder}/run", anyrank.TrainState(net)) as ckpts:
        ckpts.save()
    for seed, fill in enumerate(
        (
            lambda other: anyrank.Checkpoints(f"{folder}/run", anyrank.TrainState(other)).resume(),
            lambda other: anyrank.load(other, f"{folder}/run"),
            lambda other: anyrank.load(other, net.state_dict()),
            lambda other: anyrank.sync(other, net),
        )
    ):
        other = trained(seed + 1)
        fill(other)
        assert torch.equal(values(other), values(net))
    small = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(small, quantization.Int8WeightOnlyConfig())
    path, errors = f"{folder}/{dist.get_rank()}.pt", list[str]()
    torch.save({"model": small.state_dict(), "step": 3}, path)
    for call in (
        lambda: anyrank.load(nn.Sequential(nn.Linear(64, 64)), path, process_group=anyrank.ALONE),
        lambda: anyrank.convert(path, path + ".safetensors"),
    ):
        try:
            call()
            errors.append("none")
        except anyrank.LoadError as error:
            errors.append(str(error))
    return errors


@pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"there is no {PACKAGES}")
def test_torchao_s_float8_training_and_its_quantised_weights(tmp_path: Any) -> None:
    for errors in run_ranks(2, job_torchao, str(tmp_path), env=EAGER):
        assert all("0.weight: is a Int8Tensor" in text for text in errors), errors
