"""`layout=`: plain tensors that are parts of a whole are loaded, planned and synced as such."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import parts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import anyrank
from anyrank.model.given_layouts import RankMesh
from anyrank.testing import run_ranks
from anyrank.world.ranks import Ranks


class Part(nn.Module):
    """This rank's part of a column- and a row-parallel layer of 7 hidden units; the norm whole."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = (4, 3)[rank]
        self.up, self.down, self.norm = nn.Linear(5, own), nn.Linear(own, 5), nn.LayerNorm(5)


class Whole(nn.Module):
    """The same layers, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def layouts(mesh: DeviceMesh) -> dict[str, Any]:
    return {"up.*": (mesh, [Shard(0)]), "down.weight": (mesh, (Shard(1),))}


def check(part: Part, rank: int, full: Whole) -> None:
    rows = slice(0, 4) if rank == 0 else slice(4, 7)
    assert torch.equal(part.up.weight, full.up.weight[rows])
    assert torch.equal(part.up.bias, full.up.bias[rows])
    assert torch.equal(part.down.weight, full.down.weight[:, rows])
    assert torch.equal(part.down.bias, full.down.bias)


def job_load(path: str, meta: bool) -> None:
    rank, full = dist.get_rank(), whole()
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 0:
        torch.save(full.state_dict(), path)
    dist.barrier()
    if meta:
        with anyrank.meta():
            part = Part(rank)
    else:
        part = Part(rank)
    given: Any = layouts(mesh)
    plan = anyrank.plan(part, path, layout=given)
    report = anyrank.load(part, path, layout=lambda name: _find(given, name), verify=True)
    assert plan.share_bytes == [4 * n for n in (24 + 25 + 10, 18 + 20 + 10)]
    check(part, rank, full)
    assert report.tensors == 6
    assert isinstance(part.up.weight, nn.Parameter)


def _find(given: dict[str, Any], name: str) -> Any:
    return given["up.*"] if name.startswith("up.") else given.get(name)


def test_parts_are_loaded_and_planned(tmp_path: Path) -> None:
    for meta in (False, True):
        run_ranks(2, job_load, str(tmp_path / f"{meta}.pt"), meta)


def job_sync() -> None:
    rank = dist.get_rank()
    trainers, generators = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    full = whole()
    src = fully_shard(whole(), mesh=trainers) if rank < 2 else None
    dst = Part(rank - 2) if rank >= 2 else None
    given: Any = layouts(generators) if rank >= 2 else None
    weights = anyrank.Sync(dst, src, layout=given, verify=True)
    report = weights()
    if dst is not None:
        check(dst, rank - 2, full)
    assert not weights().is_planned
    back = whole()
    for tensor in back.parameters():
        tensor.data.zero_()
    taker = back if rank == 0 else None
    anyrank.sync(taker, dst, layout=(None, given), verify=True)
    if taker is not None:
        assert torch.equal(back.up.weight, full.up.weight)
        assert torch.equal(back.down.weight, full.down.weight)
    # Each byte once; the norm and the bias of `down`, whole on both, go to both.
    assert sum(report.bytes_received) == 4 * (35 + 7 + 35 + 2 * 15)


def test_parts_are_synced_both_ways() -> None:
    run_ranks(4, job_sync)


def job_fused() -> None:
    """A generator on ranks 2 and 3 that stacks two layers of 8 rows in one weight."""
    rank = dist.get_rank()
    names, ranks, trainers = ("0.weight", "1.weight"), [2, 3], DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(5, 8, bias=False))
    wanted = [value.chunk(2)[rank % 2].clone() for value in full.state_dict().values()]
    if rank < 2:
        weights = anyrank.Sync(None, fully_shard(full, mesh=trainers), verify=True)
    else:
        fused = torch.zeros(8, 5)
        views = dict(zip(names, fused.chunk(2), strict=True))
        given = dict.fromkeys(names, (ranks, [Shard(0)]))
        weights = anyrank.Sync(views, None, layout=(given, None), verify=True)
    for _ in range(2):
        weights()
    if rank >= 2:
        assert torch.equal(fused, torch.cat(wanted))


def test_a_generator_that_fuses_layers_takes_views_of_them() -> None:
    run_ranks(4, job_fused)


def job_intervals(folder: str) -> None:
    """Parts of several intervals, and `layout=` as a function, in every call that takes one."""
    rank = dist.get_rank()
    given = parts.layouts([0, 1], 2)
    whole, empty = parts.Parts(), parts.Parts(rank, 2)
    parts.fill(whole, 3)

    def function(name: str) -> Any:
        return given.get("d*n" if name == "down" else name)

    for layout in (given, function):
        part = parts.Parts(rank, 2)
        anyrank.sync(part, whole if rank == 0 else None, layout=(layout, None), verify=True)
        for name, held in part.named_parameters():
            full = dict(whole.named_parameters())[name]
            assert torch.equal(held, parts.part_of(name, full, rank, 2)), name
        back = parts.Parts() if rank == 1 else None
        anyrank.sync(back, part, layout=(None, layout), verify=True)
        for name, held in back.named_parameters() if back is not None else ():
            assert torch.equal(held, dict(whole.named_parameters())[name]), name
    anyrank.convert(part, f"{folder}/weights", layout=function)
    written = parts.Parts()
    anyrank.load(written, f"{folder}/weights")
    assert all(map(torch.equal, written.parameters(), whole.parameters()))
    planned = (anyrank.plan(empty, f"{folder}/weights", layout=each) for each in (given, function))
    assert len({tuple(plan.share_bytes) for plan in planned}) == 1


def test_parts_of_several_intervals_and_functions(tmp_path: Path) -> None:
    run_ranks(2, job_intervals, str(tmp_path))


def job_misspelt(kind: str) -> Any:
    """Parts that lie the other way round at the two ends: as whole tensors they would be wrong."""
    rank = dist.get_rank()
    full = torch.arange(24.0).reshape(6, 4)
    src, dst = {"up.weight": full.chunk(2)[rank].clone()}, {"up.weight": torch.zeros(3, 4)}
    key = {"right": "up.*", "pattern": "upp.*", "name": "up.wieght", "one end": "up.*"}[kind]
    into, out_of = ({key: (ranks, [Shard(0)])} for ranks in ([1, 0], [0, 1]))
    given = (into, {**out_of, "down.*": ([0, 1], [Shard(0)])} if kind == "one end" else out_of)
    try:
        anyrank.sync(dst, src, layout=given)
    except anyrank.LoadError as error:
        unchanged = not dst["up.weight"].any()
        return str(error) if unchanged else "changed"
    return torch.equal(dst["up.weight"], full.chunk(2)[1 - rank])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("right", ""),
        ("pattern", "layout= names upp.*, which no tensor of dst has on any rank that gives it"),
        ("name", "layout= names up.wieght, which no tensor of dst has"),
        ("one end", "layout= names down.*, which no tensor of src has"),
    ],
)
def test_a_misspelt_name_is_refused_in_sync(kind: str, words: str) -> None:
    answers = run_ranks(2, job_misspelt, kind)
    assert answers[0] == answers[1]
    assert answers[0] is True if kind == "right" else words in answers[0], answers


def job_one_dict_for_both() -> str:
    """Each end has its own of the names, on its own rank; one is on neither."""
    rank = dist.get_rank()
    src, dst = ({f"{end}.w": torch.full((2,), 1.0 + rank)} for end in ("src", "dst"))
    given = {"src.*": ([0], [Shard(0)]), "dst.w": ([1], [Shard(0)])}
    ends = (None, src) if rank == 0 else (dst, None)
    anyrank.sync(*ends, layout=given, rename={"src": "dst"})
    assert dst["dst.w"].tolist() == ([1.0, 1.0])
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.sync(*ends, layout={**given, "x": ([0], [Shard(0)])}, rename={"src": "dst"})
    return str(caught.value)


def test_one_dict_for_both_ends_names_tensors_of_either() -> None:
    text, other = run_ranks(2, job_one_dict_for_both)
    assert text == other
    assert "layout= names x, which no tensor of dst or src has" in text


def longest_message(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the bytes of the longest value that this rank gave the others."""
    sizes, usual = [0], Ranks.start_gather

    def spied(self: Ranks, value: Any, what: str) -> Any:
        sizes.append(len(pickle.dumps(value)))
        return usual(self, value, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start_gather", spied)
        return call(), max(sizes)


def job_again() -> list[tuple[bool, int]]:
    """Whether each call made a plan, and its longest message."""
    rank = dist.get_rank()
    names = [f"layers.{n}.weight" for n in range(40)]
    src = {name: torch.arange(8.0).reshape(4, 2) for name in names}
    halves: Any = ([0, 1], [Shard(0)])
    turns: Any = (*halves, [[(0, 1), (2, 1)], [(1, 1), (3, 1)]])
    found: list[tuple[bool, int]] = []
    dst: dict[str, torch.Tensor] = {}
    given: dict[str, Any] = {}
    weights = anyrank.Sync(dst, src if rank == 0 else None, layout=(given, None))
    for layout, mine in ((halves, [0, 1]), (halves, [0, 1]), (turns, [0, 2])):
        dst.update({name: torch.zeros(2, 2) for name in names})
        given["layers.*"] = layout
        report, size = longest_message(weights)
        found.append((report.is_planned, size))
        rows = [row + rank * (2 if layout is halves else 1) for row in mine]
        assert all(torch.equal(held, src[name][rows]) for name, held in dst.items())
    return found


def test_a_second_call_says_only_that_nothing_changed() -> None:
    for first, second, changed in run_ranks(2, job_again):
        assert [is_planned for is_planned, _ in (first, second, changed)] == [True, False, True]
        assert min(first[1], changed[1]) > 2000
        assert second[1] < 500


def job_wrong(change: str) -> str:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1])
    part: Any = Part({"short": 1, "long": 0}.get(change, rank))
    if change == "hole":
        part = Part(1 - rank)  # 3 rows before 4, where torch puts the larger chunk first
    given: dict[str, Any] = layouts(mesh)
    if change == "differs" and rank:
        given["up.*"] = (mesh, [Replicate()])
    elif change == "unused":
        given["upp"] = given["up.*"]
    elif change == "dim":
        given["up.bias"] = (mesh, [Shard(1)])
    functions: dict[str, Any] = {"raises": {}.__getitem__, "answers": lambda name: [name]}
    with pytest.raises(TypeError if change == "answers" else anyrank.LoadError) as caught:
        anyrank.load(part, whole().state_dict(), layout=functions.get(change, given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("short", "the model has shape [6, 5], the source [7, 5]"),
        ("long", "the model has shape [8, 5], the source [7, 5]"),
        ("hole", "up.weight: rank 0 holds [3, 5], and its part of [7, 5] by layout= is [4, 5]"),
        ("differs", "up.weight: ranks were given different layout= for it"),
        ("unused", "layout= names upp, which no tensor of the model has"),
        ("dim", "up.bias: layout= shards dim 1 of a tensor of 1 dims"),
        ("raises", "layout= failed for up.weight: KeyError: 'up.weight'"),
        ("answers", "layout= of up.weight: give (mesh, placements), not ['up.weight']"),
    ],
)
def test_parts_that_make_no_whole_are_refused(change: str, words: str) -> None:
    texts = run_ranks(2, job_wrong, change)
    assert texts[0] == texts[1]
    assert words in texts[0], texts[0]


@pytest.mark.parametrize(
    "given", ["model.*", {"weight": Shard(0)}, {"weight": (None, [Shard(0)])}], ids=str
)
def test_what_is_no_layout_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="layout="):
        anyrank.load(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), layout=given)


@pytest.mark.parametrize(
    ("intervals", "kind", "words"),
    [
        ([[(0, 2)], [(1, 1)]], ValueError, "an overlap before element 1"),
        ([[(0, 1)], [(2, 1)]], ValueError, "a hole before element 2"),
        ([[(0, 2)]], TypeError, "for each place on the one axis that shards"),
        ([[0, 1], [1, 1]], TypeError, "for each place on the one axis that shards"),
    ],
)
def test_intervals_hold_each_element_once(intervals: Any, kind: Any, words: str) -> None:
    given = {"weight": ([0, 1], [Shard(0)], intervals)}
    with pytest.raises(kind, match=words):
        anyrank.load(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), layout=given)


def test_the_coordinates_of_a_list_of_ranks_are_those_of_a_mesh() -> None:
    mesh = RankMesh((2, 3), (4, 5, 6, 9, 8, 7))
    assert [mesh.coordinate(rank) for rank in (4, 6, 9, 7, 1)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
        None,
    ]
