"""Replicas are compared before a save writes anything: no checkpoint is a mixture of ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.ranks.spies import warnings_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.files import content_hash
from anyrank.runs.state.replicas import TURNS
from anyrank.testing import run_ranks


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def complaint(ckpts: anyrank.Checkpoints) -> str:
    try:
        ckpts.save()
        ckpts.wait()
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def job_diverged(path: str, what: str, background: bool) -> str:
    net, optimizer = build()
    with torch.no_grad():
        if what == "model":
            net[1].weight += dist.get_rank() % 2
        elif what == "strided":
            net[1].weight = nn.Parameter(net[1].weight.detach().T.contiguous().T)
            net[1].weight += dist.get_rank() % 2
            optimizer = torch.optim.SGD(net.parameters())
        else:
            optimizer.state[net[1].weight]["exp_avg"] += dist.get_rank() % 2
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, background=background) as ckpts:
        return complaint(ckpts)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("what", ["model", "strided", "optimizer"])
def test_replicas_that_diverged_are_refused(tmp_path: Path, what: str, background: bool) -> None:
    name = "optimizer.state.1.weight.exp_avg" if what == "optimizer" else "model.1.weight"
    for text in run_ranks(3, job_diverged, str(tmp_path), what, background):
        assert f"{name}: ranks 0, 2 vs. rank 1" in text
    assert not list(tmp_path.glob("step-*"))


def job_update_from_a_buffer(path: str) -> list[str]:
    net, optimizer = build()
    net[1].register_buffer("usage", torch.full((8,), float(dist.get_rank() % 2)))
    with torch.no_grad():
        net[1].weight += net[1].usage
    ckpts = anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer), replicas_every=1)
    saved = complaint(ckpts)
    try:
        ckpts.step_done()
    except anyrank.CheckpointError as error:
        return [saved, str(error)]
    return [saved, ""]


def test_buffers_that_differ_beside_the_weights_are_named(tmp_path: Path) -> None:
    for saved, stepped in run_ranks(2, job_update_from_a_buffer, str(tmp_path)):
        assert "other differences may exist. Checkpoints(replicas_every=1)" in saved
        assert stepped.startswith("step 1: replicas differ:")
        for text in (saved, stepped):
            assert "model.1.weight: rank 0 vs. rank 1" in text
            assert "These tensors may differ, and do: model.1.usage" in text


def job_hybrid(path: str) -> list[str]:
    """Two replicas of two shards each, one of which has diverged; then the same with none."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
    state = anyrank.TrainState(net)
    said: list[str] = []
    with anyrank.Checkpoints(path, state) as ckpts:
        for rank in (3, -1):
            with torch.no_grad():
                net.weight.to_local().fill_(float(dist.get_rank() == rank))
            said.append(complaint(ckpts))
    return said


def test_replicas_of_shards_are_compared(tmp_path: Path) -> None:
    for diverged, alike in run_ranks(4, job_hybrid, str(tmp_path)):
        assert "model.weight: rank 1 vs. rank 3" in diverged
        assert alike == ""


def job_average(path: str, background: bool) -> Any:
    """An average that rank 0 alone updates."""
    net, optimizer = build()
    average = copy.deepcopy(net).requires_grad_(False)
    with torch.no_grad():
        for one in average.parameters():
            one.fill_(dist.get_rank())
    state = anyrank.TrainState(net, optimizer, ema=average)
    notes: list[list[str]] = []
    with (
        warnings_of("anyrank.state") as logged,
        anyrank.Checkpoints(path, state, background=background) as ckpts,
    ):
        for _ in range(2):
            state.step += 1
            ckpts.save()
            report = ckpts.resume()
            assert report is not None
            notes.append(report.notes)
            with torch.no_grad():
                for one in average.parameters():
                    one.add_(dist.get_rank())
    values = {float(one.sum()) for one in average.parameters()}
    return values, [note for one in notes for note in one], logged


@pytest.mark.parametrize("background", [False, True])
def test_an_average_of_the_first_rank_alone_is_saved_whole(
    tmp_path: Path, background: bool
) -> None:
    told = run_ranks(2, job_average, str(tmp_path), background)
    assert told[0][0] == {0.0}
    assert any("the first rank's are saved: ema.0" in one for one in told[0][2])
    for _, notes, _ in told:
        assert len([one for one in notes if "8 tensors differed between the ranks" in one]) == 2
        assert all("the first rank's values are kept: ema.0" in one for one in notes)


def job_later(path: str) -> list[int]:
    """At which save after the divergence it is noticed, for each parameter that may diverge."""
    noticed: list[int] = []
    for number in range(4):
        net, optimizer = build()
        state = anyrank.TrainState(net, optimizer)
        with anyrank.Checkpoints(f"{path}/{number}", state) as ckpts:
            for step in range(2 * TURNS):
                state.step += 1
                if step == 1:
                    with torch.no_grad():
                        net[number].weight[2 * number] += dist.get_rank()
                if complaint(ckpts):
                    noticed.append(step)
                    break
            assert "diverged" in complaint(ckpts)  # the next save compares the same
    return noticed


def test_a_divergence_is_noticed_within_nine_saves(tmp_path: Path) -> None:
    for noticed in run_ranks(3, job_later, str(tmp_path)):
        assert len(noticed) == 4
        assert max(noticed) <= TURNS
        assert len(set(noticed)) > 1  # each save compares another part


def job_sharded(path: str) -> str:
    """Each rank's optimizer holds the state of its own share of the parameters."""
    net, optimizer = build()
    for parameter in net.parameters():
        optimizer.state[parameter]["exp_avg"].fill_(dist.get_rank())
    with anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer)) as ckpts:
        return complaint(ckpts)


def test_an_optimizer_that_is_sharded_is_told_to_say_so(tmp_path: Path) -> None:
    for text in run_ranks(3, job_sharded, str(tmp_path)):
        assert "exp_avg: rank 0 vs. rank 1 vs. rank 2" in text
        assert "The weights are the same, so optimizer probably is a sharded optimizer" in text
        assert "Store it as DTensors" in text


# -- between saves --------------------------------------------------------------------------------


def job_compared(path: str, what: str) -> tuple[int, str, int]:
    """At which step a divergence after step 3 is noticed; the message; how many steps are saved."""
    net, optimizer = build()
    wrapped: Any = DistributedDataParallel(net)
    state = anyrank.TrainState(wrapped, optimizer)
    ckpts = anyrank.Checkpoints(path, state, replicas_every=5)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 11):
        forward = net if what == "around the wrapper" and step == 3 else wrapped
        forward(torch.randn(2, 8, generator=draw)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and dist.get_rank() == 1 and what == "model":
            flip(net[1].weight)
        if step == 3 and dist.get_rank() == 1 and what == "optimizer":
            flip(optimizer.state[net[1].weight]["exp_avg"])
        try:
            ckpts.step_done()
        except anyrank.CheckpointError as error:
            return state.step, str(error), len(ckpts.saved())
    return state.step, "", len(ckpts.saved())


def flip(tensor: torch.Tensor) -> None:
    """A bit of the last element, as a fault of the memory would; no rounding takes it back."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[-1] ^= 1 << 20


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("model", "model.1.weight"),
        ("optimizer", "optimizer.state.1.weight.exp_avg"),
        ("around the wrapper", "model.0.weight"),
    ],
)
def test_a_flipped_bit_is_named_within_so_many_steps(tmp_path: Path, what: str, name: str) -> None:
    for noticed, text, saved in run_ranks(3, job_compared, str(tmp_path), what):
        alike = "rank 0 vs. rank 1 vs. rank 2"
        alike = alike if what == "around the wrapper" else "ranks 0, 2 vs. rank 1"
        assert (noticed, saved) == (5, 0)
        assert text.startswith("step 5: replicas differ:")
        assert f"{name}: {alike}" in text


def job_alike(path: str) -> list[int]:
    """A run with a buffer that each rank has its own way, compared at each step."""
    net, optimizer = build()
    net.append(nn.BatchNorm1d(8))
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state, replicas_every=1) as ckpts:
        for _ in range(3):
            net[4].running_mean += dist.get_rank()
            ckpts.step_done()
    return [saved.step for saved in ckpts.saved()]


def test_what_may_differ_is_not_compared_between_saves(tmp_path: Path) -> None:
    assert run_ranks(2, job_alike, str(tmp_path)) == [[3], [3]]


def job_unlike_models(path: str) -> str:
    state = anyrank.TrainState(nn.ModuleDict({f"net{dist.get_rank()}": nn.Linear(2, 2)}))
    ckpts = anyrank.Checkpoints(path, state, replicas_every=1)
    try:
        ckpts.step_done()
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def test_models_of_other_names_are_not_compared(tmp_path: Path) -> None:
    for text in run_ranks(2, job_unlike_models, str(tmp_path)):
        assert text == (
            "step 1: the ranks' states differ: rank 0 has model.net0.weight [2, 2] torch.float32, "
            "but rank 1 has model.net1.weight [2, 2] torch.float32. Build the same model on every "
            "rank."
        )


class OwnState(torch.optim.SGD):
    """Saved through its own methods, so that its groups are not part of a compared record."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def job_unlike_kinds(path: str, what: str) -> list[str]:
    """Tensors with the same name, shape and values, which only some ranks keep the same."""
    net, optimizer = build()
    average = copy.deepcopy(net).requires_grad_(False)
    if what == "buffer":
        if dist.get_rank() == 1:
            net[1].scale = nn.Parameter(torch.ones(8), requires_grad=False)
        else:
            net[1].register_buffer("scale", torch.ones(8))
    else:
        trained = [*net.parameters(), *(average.parameters() if dist.get_rank() == 1 else ())]
        optimizer = OwnState(trained)
    state = anyrank.TrainState(net, optimizer, ema=average)
    ckpts = anyrank.Checkpoints(path, state, replicas_every=1)
    said = [complaint(ckpts)]
    try:
        ckpts.step_done()
    except anyrank.CheckpointError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "buffer",
            "rank 0 has model.1.scale [8] torch.float32 (may differ, because it is a buffer or in "
            "no optimizer), but rank 1 has model.1.scale [8] torch.float32. ",
        ),
        (
            "optimizer",
            "rank 0 has ema.0.weight [8, 8] torch.float32 (may differ, because it is a buffer or "
            "in no optimizer), but rank 1 has ema.0.weight [8, 8] torch.float32. ",
        ),
    ],
)
def test_ranks_agree_which_tensors_may_differ_before_they_write(
    tmp_path: Path, what: str, text: str
) -> None:
    """Otherwise the ranks plan different writes, and elements are written twice or by nobody."""
    for saved, compared in run_ranks(3, job_unlike_kinds, str(tmp_path), what):
        assert saved.startswith(f"the ranks' states differ: {text}")
        assert compared.startswith(f"step 1: the ranks' states differ: {text}")
    assert not list(tmp_path.glob("step-*"))


@contextlib.contextmanager
def bytes_hashed() -> Generator[list[int]]:
    """Sizes of what is hashed on this rank within."""
    sizes: list[int] = []
    hash_of = content_hash.hash_of

    def count(parts: Iterable[torch.Tensor]) -> str:
        parts = [*parts]
        sizes.append(sum(part.nbytes for part in parts))
        return hash_of(parts)

    with patch.object(content_hash, "hash_of", count):
        yield sizes


def job_verified(wrapper: str) -> tuple[int, int, dict[str, int]]:
    net, source = nn.Linear(6, 4), {"weight": torch.ones(4, 6), "bias": torch.ones(4)}
    source["weight"][0, 0], source["bias"][3] = torch.nan, torch.inf
    if wrapper != "none":
        shape = (2, 2) if wrapper == "hsdp" else (4,)
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    with bytes_hashed() as sizes:
        report = anyrank.load(net, source, verify=True)
    held = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in net.parameters())
    return sum(sizes), held, report.nonfinite


@pytest.mark.parametrize(("wrapper", "is_held_twice"), [("none", 1), ("hsdp", 1), ("fsdp", 0)])
def test_a_verified_load_hashes_what_others_hold_and_counts_each_element_once(
    wrapper: str, is_held_twice: int
) -> None:
    for hashed, held, nonfinite in run_ranks(4, job_verified, wrapper):
        assert hashed == held * is_held_twice
        assert nonfinite == {"weight": 1, "bias": 1}


def job_hashed(path: str, exact: bool) -> dict[str, int]:
    """Bytes that a save hashes on this rank to compare replicas, and those of the whole state."""
    data = anyrank.ElasticLoader(torch.zeros(4, 90), global_batch=2, microbatch=1, exact=exact)
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(90, 40))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 90)).sum().backward()
    optimizer.step()
    tensors = [*net.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    with (
        bytes_hashed() as sizes,
        anyrank.Checkpoints(path, anyrank.TrainState(net, optimizer, data=data)) as ckpts,
    ):
        ckpts.save()
    return {"state": sum(tensor.nbytes for tensor in tensors), "replicas": sum(sizes)}


@pytest.mark.parametrize("exact", [False, True])
def test_a_save_hashes_a_ninth_of_the_replicas(tmp_path: Path, exact: bool) -> None:
    for row in run_ranks(2, job_hashed, str(tmp_path / "run"), exact):
        assert 0 < row["replicas"] < row["state"] / 8


# -- parameters that microbatches() did not get ---------------------------------------------------


def job_loss_module(path: str, kind: str) -> str:
    """A run whose loss has parameters; returns the error of its first step, or "" for none."""
    torch.manual_seed(0)
    model: nn.Module = DistributedDataParallel(nn.Linear(2, 2))
    loss: nn.Module = nn.Linear(2, 1)
    if kind == "of its own wrapper":
        loss = DistributedDataParallel(loss)
    if kind == "frozen":
        loss.requires_grad_(requires_grad=False)
    both = nn.ModuleList([model, loss])
    params = [param for module in both for param in module.parameters() if param.requires_grad]
    optimizers: dict[str, Any] = {"opt": torch.optim.SGD(params, lr=0.1)}
    if kind == "of its own optimizer":
        parts = (("opt", model), ("other", loss))
        optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.1) for k, m in parts}
    loader = anyrank.ElasticLoader(torch.randn(8, 2), global_batch=4, microbatch=2)
    state = anyrank.TrainState(model, loss=loss, data=loader, **optimizers)
    ckpts = anyrank.Checkpoints(path, state)
    told = ""
    try:
        for step in ckpts.steps(until=2):
            for batch in step.microbatches(both if kind == "given" else model):
                step.backward(loss(model(batch)).square().mean())
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    except anyrank.CheckpointError as error:
        told = f"{state.step}: {error}"
    ckpts.close()
    return told


@pytest.mark.parametrize("kind", ["without a wrapper", "of its own optimizer"])
def test_a_loss_that_no_pass_exchanges_is_refused_in_its_first_step(
    tmp_path: Path, kind: str
) -> None:
    for told in run_ranks(2, job_loss_module, str(tmp_path), kind):
        assert told.startswith("1: step 1: replicas differ:")
        assert "loss.weight: rank 0 vs. rank 1" in told
        assert "pass nn.ModuleList([model, loss])" in told


@pytest.mark.parametrize("kind", ["given", "of its own wrapper", "frozen"])
def test_a_loss_that_is_exchanged_or_frozen_is_right(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, job_loss_module, str(tmp_path), kind) == ["", ""]
