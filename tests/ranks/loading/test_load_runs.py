"""Runs that ranks load: each reads the indexes of the ranks whose shares meet its own, and no
others.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.sharded_nets import LAYOUTS, Net, reference
from tests.runs import forge, resume, save
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.loading import headers
from anyrank.sources import rank_index
from anyrank.sources.locate import locate, locate_all
from anyrank.sources.source import list_headers, list_source
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.testing import RanksFailed, run_ranks

STEP = "step-00000000"
SAVED_ON = 4


@contextlib.contextmanager
def indexes_read() -> Generator[list[str]]:
    """Names of the ranks' indexes that this process reads."""
    names: list[str] = []
    usual = rank_index.read_small

    def spied(storage: Any, folder: str, name: str, expected: Any) -> bytes:
        names.append(name)
        return usual(storage, folder, name, expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_index, "read_small", spied)
        yield names


def net(fill: float = 0.0) -> nn.Module:
    """Layers whose rows all numbers of ranks divide."""
    layers = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 24), nn.Linear(24, 12, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            values = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.copy_(values + fill + 100 * number)
    return layers


def state_of(model: nn.Module) -> anyrank.TrainState:
    return anyrank.TrainState(model, torch.optim.AdamW(model.parameters()))


def job_save(path: str) -> None:
    save(path, state_of(fully_shard(net(1.0))))


def job_load(path: str, strategy: Any, how: str) -> tuple[list[str], Any]:
    """Load or resume; this rank's indexes, and the report."""
    model = net()
    if how == "meta":
        with anyrank.meta():
            model = net()
    fully_shard(model)
    with indexes_read() as names:
        if how == "resume":
            report: Any = resume(path, state_of(model), "must")
        else:
            report = anyrank.load(model, path, strategy=strategy, verify=how == "verify")
    for parameter, expected in zip(model.parameters(), net(1.0).parameters(), strict=True):
        held: Any = parameter
        assert torch.equal(held.full_tensor(), expected)
    return names, report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run"))
    run_ranks(SAVED_ON, job_save, path)
    return path


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", ["load", "meta", "verify", "resume"])
def test_a_rank_reads_the_indexes_that_its_share_meets(run: str, world: int, how: str) -> None:
    for rank, (names, _) in enumerate(run_ranks(world, job_load, run, "auto", how)):
        first, last = SAVED_ON * rank // world, -(-SAVED_ON * (rank + 1) // world)
        met = {f"__{other}_0.json" for other in range(first, last)}
        assert len(met) <= SAVED_ON / world + 2
        # What the ranks that saved did not share, others have of the first.
        met |= {"__0_0.json"} if how == "resume" and world != SAVED_ON else set()
        assert sorted(names) == sorted(met)


@pytest.mark.parametrize("strategy", ["stripe", "scatter"])
def test_ranks_that_pass_bytes_on_have_all_indexes_from_one(run: str, strategy: str) -> None:
    (first, report), *others = run_ranks(3, job_load, run, strategy, "load")
    assert sorted(first) == [f"__{rank}_0.json" for rank in range(SAVED_ON)]
    assert all(names == [] for names, _ in others)
    assert report.strategy == strategy


def job_sent(path: str) -> int:
    """The bytes of the headers that the first rank sends."""
    with pytest.MonkeyPatch.context() as patch:
        lengths: list[int] = []
        usual = pickle.dumps

        def spied(value: Any) -> bytes:
            lengths.append(len(usual(value)))
            return usual(value)

        patch.setattr(headers, "pickle", type("pickle", (), {"dumps": staticmethod(spied)}))
        anyrank.load(fully_shard(net()), path)
    return sum(lengths)


def test_headers_do_not_grow_with_ranks_times_tensors(run: str) -> None:
    tensors = len(list_source(run).tensors)
    complete = len(pickle.dumps(list_source(run)))
    sent = run_ranks(2, job_sent, run)[0]
    assert tensors == 5
    assert 0 < sent < complete


def job_layouts(path: str, layout: str) -> None:
    with anyrank.meta():
        model = Net()
    model = LAYOUTS[layout](model)
    anyrank.load(model, path, verify=True)
    values = LAYOUTS[layout](reference()).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def job_save_layout(path: str, layout: str) -> None:
    save(path, state_of(LAYOUTS[layout](reference())))


@pytest.mark.parametrize("saved", ["fsdp", "hsdp", "fsdp_tp"])
def test_runs_of_one_layout_are_loaded_into_others(tmp_path: Path, saved: str) -> None:
    """Ties, buffers, tensors with fewer rows than ranks and without rows."""
    run_ranks(4, job_save_layout, str(tmp_path), saved)
    for world, layout in ((2, "fsdp"), (3, "fsdp"), (2, "plain"), (2, "tp"), (4, "fsdp_tp")):
        run_ranks(world, job_layouts, str(tmp_path), layout)


class Turned(nn.Module):
    """A weight under two names, one of which is the other's transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, 8))
        self.second = nn.Parameter(self.first.data.t())


def job_turned(path: str) -> list[str]:
    model = Turned()
    with indexes_read() as names:
        anyrank.load(model, path, rename={"weight": "second"})
    assert torch.equal(model.second, torch.arange(32.0).view(8, 4))
    return names


def test_a_tensor_that_is_turned_needs_all_indexes(tmp_path: Path) -> None:
    layer = nn.Linear(4, 8, bias=False)
    layer.weight.data.copy_(torch.arange(32.0).view(8, 4))
    save(tmp_path, anyrank.TrainState(layer))
    assert run_ranks(2, job_turned, str(tmp_path)) == [["__0_0.json"], []]


# -- tensors that one rank has --------------------------------------------------------------------


class Tracker:
    """A stateful object whose tensors differ between the ranks."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["weight"]


def job_own(path: str) -> None:
    values = torch.full((2, 2 + dist.get_rank()), float(dist.get_rank()))
    save(path, anyrank.TrainState(fully_shard(net()), tracker=Tracker(values)))


def job_load_own(path: str) -> list[str]:
    layer = nn.Linear(4, 2, bias=False)
    with indexes_read() as names:
        rename = {"tracker.weight@00002": "weight"}
        anyrank.load(layer, path, rename=rename, unexpected="ignore")
    assert torch.equal(layer.weight, torch.full((2, 4), 2.0))
    return names


def test_tensors_that_one_rank_has_are_found(tmp_path: Path, run: str) -> None:
    run_ranks(3, job_own, str(tmp_path))
    index = json.loads((tmp_path / STEP / "tensors.json").read_text())
    assert index["owners"] == [0, 1, 2]
    first, second = run_ranks(2, job_load_own, str(tmp_path))
    assert first == ["__0_0.json", "__1_0.json", "__2_0.json", "__2_0.json"]
    assert second == ["__2_0.json"]
    with indexes_read() as names:
        list_headers(run)
    assert names == []  # no rank of that run has a tensor of its own


# -- what is damaged ------------------------------------------------------------------------------

DAMAGE = {
    "no index": ("__3_0.json: is missing", lambda step: (step / "__3_0.json").unlink()),
    "another index": (
        "__3_0.json: .* The file is corrupt",
        lambda step: (step / "__3_0.json").write_bytes((step / "__2_0.json").read_bytes()),
    ),
    "a cut file": (
        "__3_0.distcp: has 64 bytes",
        lambda step: os.truncate(step / "__3_0.distcp", 64),
    ),
    "no file": ("__3_0.distcp: is missing", lambda step: (step / "__3_0.distcp").unlink()),
    "no index of the step": (
        "tensors.json: is missing",
        lambda step: (step / "tensors.json").unlink(),
    ),
}


def job_damaged(path: str, said: str) -> None:
    with anyrank.meta():
        model = fully_shard(net())
    for call in (anyrank.load, anyrank.plan):
        with pytest.raises(anyrank.LoadError, match=said):
            call(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_index_or_file_is_every_rank_s_error(tmp_path: Path, run: str, what: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    said, damage = DAMAGE[what]
    damage(tmp_path / "run" / STEP)
    run_ranks(2, job_damaged, str(tmp_path / "run"), said)


def test_a_lost_piece_is_an_error_before_anything_changes(tmp_path: Path, run: str) -> None:
    """An index that is as its manifest says, and has no place for a part of a tensor."""
    step = tmp_path / STEP
    shutil.copytree(Path(run, STEP), step)
    index = json.loads((step / "__3_0.json").read_text())
    index["boxes"] = index["boxes"][1:]
    data = (json.dumps(index) + "\n").encode()
    (step / "__3_0.json").write_bytes(data)
    table = json.loads((step / "anyrank.json").read_text())
    table["ranks"][3][1:] = [len(data), rank_index_digest(data)]
    forge(step, table)
    run_ranks(2, job_damaged, str(tmp_path), "indexes list only .* elements. The step is corrupt")


def rank_index_digest(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def job_flipped(path: str) -> None:
    with pytest.raises(
        anyrank.LoadError, match=r"__1_0\.distcp: bytes 0 to .* The file is corrupt"
    ):
        anyrank.load(fully_shard(net()), path, verify=True)


def test_verify_compares_the_files_of_a_run(tmp_path: Path, run: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / STEP / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run_ranks(2, job_flipped, str(tmp_path / "run"))


# -- copies ---------------------------------------------------------------------------------------


def job_copies(folder: str) -> None:
    """Each rank sees the run in another place, as on machines that share no disk."""
    before = os.getcwd()
    os.chdir(f"{folder}/{dist.get_rank()}")
    try:
        job_load("run", "auto", "load")
    finally:
        os.chdir(before)


def test_a_copy_of_a_run_is_recognised_by_its_manifest(tmp_path: Path, run: str) -> None:
    for rank in range(2):
        shutil.copytree(run, tmp_path / str(rank) / "run")
    run_ranks(2, job_copies, str(tmp_path))
    shutil.rmtree(tmp_path / "1" / "run")
    run_ranks(SAVED_ON, job_save, str(tmp_path / "1" / "run"))
    with pytest.raises(
        RanksFailed, match=f"run/{STEP}: differs from the step whose index was read on another rank"
    ):
        run_ranks(2, job_copies, str(tmp_path))


def test_what_is_not_wanted_has_no_place(run: str) -> None:
    """So that an error does not name a tensor that lies elsewhere."""
    listing = list_headers(run)
    stored = listing.tensors["0.weight"]
    rows = Piece(Box((0, 0), (3, 4)), (0, 0))
    placed, (found,) = locate(listing, [(stored, (rows,))], 2)
    assert [chunk.file for chunk in found.chunks] == [0]
    assert placed.tensors["0.weight"].chunks == found.chunks
    others = {**placed.tensors, **placed.beside}
    del others["0.weight"]
    assert not any(other.chunks for other in others.values())
    assert placed.names_at(0, 0, placed.files[0].size) == "0.weight: "


def test_places_that_are_found_for_all_are_those_of_the_ranks_indexes(run: str) -> None:
    listing = locate_all(list_headers(run))
    assert not listing.locators
    assert [Path(info.path).name for info in listing.files] == [
        f"__{rank}_0.distcp" for rank in range(SAVED_ON)
    ]
    for stored in (*listing.tensors.values(), *listing.beside.values()):
        assert sum(chunk.box.numel for chunk in stored.chunks) == stored.numel
