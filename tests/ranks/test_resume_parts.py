"""`TrainState(layout=)`: plain parts are saved as parts of the whole, and resumed in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks.parts import Parts, build, fill, layouts, part_of, train
from tests.runs import resume, save
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import anyrank
from anyrank.testing import run_ranks

Found = dict[str, torch.Tensor]
PARTS = ("parts", "pairs")


def place(layout: str, rank: int, size: int) -> tuple[int, int]:
    """Which part of how many a rank holds."""
    return (rank, size) if layout == "parts" else (rank % 2, 2) if layout == "pairs" else (0, 1)


def state_of(layout: str) -> tuple[anyrank.TrainState, nn.Module, Any, nn.Module]:
    """A state of zeros: the model, its optimizer, and an average within a wrapper."""
    model, optimizer, given = build(layout)
    average = nn.Module()
    average.module = build(layout)[0]
    state = anyrank.TrainState(model, optimizer, ema=average, layout=given)
    return state, model, optimizer, average


def summary(model: nn.Module, optimizer: Any, average: nn.Module) -> Found:
    """Parameters, optimizer state and average of this rank, by name."""
    found: dict[str, Any] = dict(model.named_parameters())
    found |= {f"ema/{name}": tensor for name, tensor in average.module.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    whole = {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in found.items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def trained(layout: str) -> tuple[anyrank.TrainState, Found]:
    """A state after two steps."""
    state, model, optimizer, average = state_of(layout)
    at = place(
        layout, *((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1))
    )
    fill(model, 7, *at)
    fill(average.module, 8, *at)
    train(model, optimizer, range(2), *at)
    return state, summary(model, optimizer, average)


def job_save(path: str, layout: str) -> None:
    state, _ = trained(layout)
    save(path, state)


def job_resume(paths: list[str], layout: str, again: str) -> list[tuple[Found, Any]]:
    """What a state is after it is resumed from each run; saves the last one again."""
    found: list[tuple[Found, Any]] = []
    for path in paths:
        state, *objects = state_of(layout)
        report = resume(path, state, "must")
        found.append((summary(*objects), report))
    save(again, state)
    return found


def check(every: list[tuple[Found, Any]], layout: str, rank: int, size: int) -> None:
    _, want = trained("plain")
    for found, report in every:
        assert found.keys() == want.keys()
        for name, value in want.items():
            tensor = name.removeprefix("ema/").split("/")[0]
            mine = part_of(tensor, value, *place(layout, rank, size)) if value.ndim else value
            assert torch.equal(found[name], mine), (rank, name)
        assert report.components["model"] == report.components["optimizer"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs of parts on 2 ranks, and of two groups of 2 that hold the same parts."""
    found: list[str] = []
    for size, layout in ((2, "parts"), (4, "pairs")):
        found.append(str(tmp_path_factory.mktemp(layout)))
        run_ranks(size, job_save, found[-1], layout)
    return found


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, "plain"), (2, "parts"), (3, "parts"), (2, "fsdp"), (3, "fsdp"), (4, "pairs")],
)
def test_parts_are_resumed_in_any_layout_and_back(
    saved: list[str], tmp_path: Path, size: int, layout: str
) -> None:
    again = str(tmp_path / "again")
    for rank, every in enumerate(run_ranks(size, job_resume, saved, layout, again)):
        check(every, layout, rank, size)
        exact = [report.components["model"] == "exact" for _, report in every]
        assert exact == [(size, layout) == one for one in ((2, "parts"), (4, "pairs"))]
    for rank, every in enumerate(run_ranks(2, job_resume, [again], "parts", again + "2")):
        check(every, "parts", rank, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
def test_stock_dcp_reads_the_whole_tensors(saved: list[str]) -> None:
    _, want = trained("plain")
    names = [name for name, _ in Parts().named_parameters()]
    table = {f"model.{name}": torch.empty_like(want[name]) for name in names}
    table |= {
        f"optimizer.state.{name}.{key}": torch.empty_like(want[f"{name}/{key}"])
        for name in names
        for key in ("exp_avg", "exp_avg_sq")
    }
    for path in saved:
        dcp.load(table, checkpoint_id=f"{path}/step-00000000", no_dist=True)
        for key, value in table.items():
            name = key.removeprefix("model.").removeprefix("optimizer.state.")
            assert torch.equal(value, want[name.replace(".exp", "/exp")]), key


def job_wrong(path: str, change: str) -> str:
    """The error of a save, whose ranks hold something else than `layout=` says."""
    rank = dist.get_rank()
    given: dict[str, Any] = layouts([0, 1], 2)
    data = None
    if change == "overlap":
        given = layouts([1, 0], 2)
    elif change == "differs" and rank:
        given["bias"] = ([0, 1], [Replicate()])
    elif change == "absent":
        given["bias"] = ([0, 1, 2], [Shard(0)])
    elif change == "outside":
        given["bias"] = ([0], [Shard(0)])
    elif change in ("averaged", "exact"):
        group = None if change == "averaged" else anyrank.ALONE
        exact = change == "exact"
        data = anyrank.ElasticLoader(
            torch.zeros(8, 1), global_batch=4, microbatch=2, process_group=group, exact=exact
        )
    model = Parts(rank, 2)
    fill(model, 7, rank, 2)
    if change == "replica" and rank:
        model.norm.weight.data[0] = 3
    state = anyrank.TrainState(model, layout=given, data=data)
    with pytest.raises(anyrank.CheckpointError) as caught:
        save(path, state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("overlap", "model.gate_up: rank 0 holds [8, 4], and its part of [14, 4] by layout= is [6"),
        ("differs", "model differs between rank 0 and rank 1"),
        ("absent", "model.bias: its layout= has rank 2 in its mesh, which takes no part"),
        ("outside", "model.bias: rank 1 holds [3], and is not in the mesh"),
        ("averaged", "model.embed: rank 1 holds another part of it by layout=, and the loader"),
        ("exact", "exact=True: model.embed is sharded over ranks [0, 1] by layout="),
        ("replica", "model.norm.weight: ranks [0] unlike ranks [1]"),
    ],
)
def test_what_is_no_layout_of_the_state_is_refused(tmp_path: Path, change: str, words: str) -> None:
    first, second = run_ranks(2, job_wrong, str(tmp_path), change)
    assert first == second
    assert words in first, first
    assert not list(tmp_path.glob("step-*"))


def job_reshaped(path: str) -> str:
    rank = dist.get_rank()
    model = Parts(rank, 2)
    state = anyrank.TrainState(model, layout=layouts([0, 1], 2))
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.save()
        ckpts.step_done()
        model.bias = nn.Parameter(torch.zeros(5))
        with pytest.raises(anyrank.CheckpointError) as caught:
            ckpts.save()
        model.bias = nn.Parameter(torch.zeros(4 - rank))
    return str(caught.value)


def test_a_part_that_changed_its_shape_is_refused(tmp_path: Path) -> None:
    text = run_ranks(2, job_reshaped, str(tmp_path))[0]
    assert "model.bias: is [5] here, and was [4] when its layout= was read" in text


def job_adopt(path: str, source: str) -> Found:
    state, *objects = state_of("parts")
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.resume(source)
    return summary(*objects)


def test_another_tools_whole_tensors_become_parts(tmp_path: Path) -> None:
    state, model, optimizer, _ = state_of("plain")
    fill(model, 7)
    train(model, optimizer, range(2))
    source = str(tmp_path / "other.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    want = summary(model, optimizer, state.parts.parts["ema"])
    for rank, found in enumerate(run_ranks(2, job_adopt, str(tmp_path / "run"), source)):
        for name in [name for name in want if not name.startswith("ema/") and want[name].ndim]:
            assert torch.equal(found[name], part_of(name.split("/")[0], want[name], rank, 2)), name
