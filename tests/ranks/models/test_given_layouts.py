"""`layout=`: plain tensors that are parts of a whole are loaded, planned and synced as such."""

from __future__ import annotations

import logging
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
from anyrank.models.dialects.layouts.given import RankMesh
from anyrank.testing import run_ranks


class Part(nn.Module):
    """A rank's part of a column- and a row-parallel layer of 8 hidden units; the norm whole."""

    def __init__(self, own: int = 4) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, own), nn.Linear(own, 5), nn.LayerNorm(5)


class Whole(Part):
    """The same layers, whole."""

    def __init__(self) -> None:
        super().__init__(8)


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def layouts(mesh: DeviceMesh) -> dict[str, Any]:
    return {"up.*": (mesh, [Shard(0)]), "down.weight": (mesh, (Shard(1),))}


def check(part: Part, rank: int, full: Whole) -> None:
    rows = slice(4 * rank, 4 * rank + 4)
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
            part = Part()
    else:
        part = Part()
    given: Any = layouts(mesh)
    plan = anyrank.plan(part, path, layout=given)
    report = anyrank.load(part, path, layout=lambda name: _find(given, name), verify=True)
    assert plan.share_bytes == [4 * (24 + 25 + 10)] * 2
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
    dst = Part() if rank >= 2 else None
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
    assert sum(report.bytes_received) == 4 * (40 + 8 + 40 + 2 * 15)


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


class Said(logging.Handler):
    """What was logged, while it is used."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("anyrank").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("anyrank").removeHandler(self)


def job_misspelled() -> list[list[str]]:
    """Warnings of syncs and a load, of which each has a name that no tensor has."""
    rank = dist.get_rank()
    full = torch.arange(24.0).reshape(6, 4)
    half: Any = ([0, 1], [Shard(0)])
    src, dst = {"up.weight": full.chunk(2)[rank].clone()}, {"up.weight": torch.zeros(3, 4)}
    given = {"up.*": half, "down.*": half}
    more = {"more": half}
    found: list[list[str]] = []
    syncs: list[Any] = [
        anyrank.Sync(dst, src, layout=given),
        anyrank.Sync(dst, src, layout=({"upp.*": half}, {"up.wieght": half})),
        anyrank.Sync(dst, src if rank == 0 else None, layout=(None, more), rename={"x": "y"}),
    ]
    for weights in syncs:
        with Said() as texts:
            weights()
            weights()  # by the kept plan, and without a further warning
        found.append(texts)
    with Said() as texts:
        anyrank.load(nn.Linear(4, 3), {"weight": full[:3], "bias": full[0, :3]}, layout=more)
    return [*found, texts]


def test_a_name_that_no_tensor_has_is_told_by_each_rank_once() -> None:
    text = "layout= names {}, which matches no tensor of this rank"
    one, other = run_ranks(2, job_misspelled)
    assert one[0] == other[0] == [text.format("down.*")]
    assert one[1] == other[1] == [text.format("upp.*"), text.format("up.wieght")]
    idle = "x: this entry of rename= matches no key"  # once for all ranks
    assert (one[2], other[2]) == ([idle, text.format("more")], [])
    assert one[3] == other[3] == [text.format("more")]


def job_one_dict_for_both() -> list[str]:
    """Each end has its own of the names, on its own rank."""
    rank = dist.get_rank()
    src, dst = ({f"{end}.w": torch.full((2,), 1.0 + rank)} for end in ("src", "dst"))
    given = {"src.*": ([0], [Shard(0)]), "dst.w": ([1], [Shard(0)])}
    ends = (None, src) if rank == 0 else (dst, None)
    with Said() as texts:
        anyrank.sync(*ends, layout=given, rename={"src": "dst"})
    assert dst["dst.w"].tolist() == ([1.0, 1.0])
    return texts


def test_one_dict_for_both_ends_names_tensors_of_either() -> None:
    assert run_ranks(2, job_one_dict_for_both) == [[], []]


def job_again() -> list[bool]:
    """Whether each call made a plan."""
    rank = dist.get_rank()
    names = [f"layers.{n}.weight" for n in range(40)]
    src = {name: torch.arange(8.0).reshape(4, 2) for name in names}
    halves: Any = ([0, 1], [Shard(0)])
    turns: Any = (*halves, [[(0, 1), (2, 1)], [(1, 1), (3, 1)]])
    found: list[bool] = []
    dst: dict[str, torch.Tensor] = {}
    given: dict[str, Any] = {}
    weights = anyrank.Sync(dst, src if rank == 0 else None, layout=(given, None))
    for layout, mine in ((halves, [0, 1]), (halves, [0, 1]), (turns, [0, 2])):
        dst.update({name: torch.zeros(2, 2) for name in names})
        given["layers.*"] = layout
        found.append(weights().is_planned)
        rows = [row + rank * (2 if layout is halves else 1) for row in mine]
        assert all(torch.equal(held, src[name][rows]) for name, held in dst.items())
    return found


def test_a_layout_that_says_something_else_is_planned_anew() -> None:
    assert run_ranks(2, job_again) == [[True, False, True]] * 2


def job_uneven(path: str, rows: int, meta: bool) -> None:
    """Parts of a number of rows that two does not divide, as torch cuts them."""
    rank = dist.get_rank()
    own = min(-(-rows // 2), rows - rank * -(-rows // 2))
    torch.manual_seed(1)
    full = {"weight": torch.randn(rows, 3), "bias": torch.randn(rows)}
    if rank == 0:
        torch.save(full, path)
    dist.barrier()
    if meta:
        with anyrank.meta():
            part = nn.Linear(3, own)
    else:
        part = nn.Linear(3, own)
    given: Any = {"*": ([0, 1], [Shard(0)])}
    anyrank.plan(part, path, layout=given)
    for strategy in ("own", "scatter"):
        anyrank.load(part, path, layout=given, strategy=strategy, verify=True)  # type: ignore[arg-type]
        first = rank * -(-rows // 2)
        assert torch.equal(part.weight, full["weight"][first : first + own])
        assert torch.equal(part.bias, full["bias"][first : first + own])


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("rows", [45, 1, 8])
def test_parts_as_torch_cuts_the_source_are_right(rows: int, meta: bool, tmp_path: Path) -> None:
    run_ranks(2, job_uneven, str(tmp_path / "w.pt"), rows, meta)


def job_uneven_sync(folder: str, rows: int) -> list[bool]:
    """Parts as torch cuts them from one rank count to another and into files; whether planned."""
    rank, names = dist.get_rank(), ("weight", "bias")
    torch.manual_seed(1)
    full = [torch.randn(rows, 3), torch.randn(rows)]
    trainers: Any = {"*": ([0, 1, 2], [Shard(0)])}
    mesh = [[2, 1], [3, 0]]
    grid: Any = {"weight": (mesh, [Shard(0), Shard(1)]), "bias": (mesh, [Shard(0), Replicate()])}
    src = None
    if rank < 3:
        src = dict(zip(names, (split(tensor, 3, rank) for tensor in full), strict=True))
    row, column = {2: (0, 0), 1: (0, 1), 3: (1, 0), 0: (1, 1)}[rank]
    wanted = {"weight": split(split(full[0], 2, row), 2, column, 1), "bias": split(full[1], 2, row)}
    dst = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    weights = anyrank.Sync(dst, src, layout=(grid, trainers), verify=True)
    planned: list[bool] = []
    for _ in range(2):
        planned.append(weights().is_planned)
        assert all(torch.equal(dst[name], wanted[name]) for name in wanted)
    group: Any = dist.new_group([0, 1, 2])
    if src is not None:
        part = nn.Linear(3, len(src["bias"]))
        part.load_state_dict(src)
        anyrank.convert(part, f"{folder}/w", layout=trainers, process_group=group)
        written = nn.Linear(3, rows)
        anyrank.load(written, f"{folder}/w", process_group=group)
        assert all(map(torch.equal, written.parameters(), full))
    dist.barrier()
    return planned


def split(tensor: torch.Tensor, number: int, index: int, dim: int = 0) -> torch.Tensor:
    """A part of a tensor as torch cuts it; empty where there are fewer."""
    parts = torch.chunk(tensor, number, dim)
    return (parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)).clone()


@pytest.mark.parametrize("rows", [45, 4, 1])
def test_parts_as_torch_cuts_them_are_synced_and_converted(rows: int, tmp_path: Path) -> None:
    assert run_ranks(4, job_uneven_sync, str(tmp_path), rows) == [[True, False]] * 4


def job_wrong(change: str) -> str:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1])
    part: Any = Part({"short": 3, "long": 5, "uneven": 5 - 2 * rank}.get(change, 4))
    given: dict[str, Any] = layouts(mesh)
    if change == "differs" and rank:
        given["up.*"] = (mesh, [Replicate()])
    elif change == "intervals":
        given["up.*"] = (mesh, [Shard(0)], [[(0, 3)], [(3, 5)]])
    elif change == "dim":
        given["up.bias"] = (mesh, [Shard(1)])
    elif change == "absent":
        given["up.bias"] = ([0, 1, 2], [Shard(0)])
    elif change == "own first":
        given["up.bias"] = ([rank, 1 - rank], [Shard(0)])
    functions: dict[str, Any] = {"raises": {}.__getitem__, "answers": lambda name: [name]}
    with pytest.raises(TypeError if change == "answers" else anyrank.LoadError) as caught:
        anyrank.load(part, whole().state_dict(), layout=functions.get(change, given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "short",
            "up.weight: this rank, at mesh coordinate [0] of its layout=, holds [3, 5], ",
        ),
        (
            "long",
            "holds [5, 5], but the source has [8, 5] (up.weight), and an even split gives [0]:",
        ),
        ("uneven", "an even split gives [0]: [4, 5], [1]: [4, 5]. If the split is uneven"),
        ("differs", "holds [4, 5], but the source has [8, 5] (up.weight), and an even split gives"),
        (
            "intervals",
            "up.weight: rank 0 holds [4, 5], but its part of [8, 5] according to layout= is [3",
        ),
        (
            "absent",
            "up.bias: the mesh of its layout= has rank 2, which does not take part in the call",
        ),
        (
            "own first",
            "up.bias: the parts that the ranks declare by layout= do not add up to one tensor",
        ),
        ("dim", "up.bias: layout= shards dim 1, but the tensor has 1 dim"),
        ("raises", "layout= failed for up.weight: KeyError: 'up.weight'"),
        ("answers", "layout= of up.weight: expected (mesh, placements), got ['up.weight']"),
    ],
)
def test_parts_that_make_no_whole_are_refused(change: str, words: str) -> None:
    texts = run_ranks(2, job_wrong, change)
    assert texts[0] == texts[1]
    assert words in texts[0], texts[0]


def job_no_whole(change: str) -> str:
    """The error of a sync whose ranks hold parts of different sizes, or not all parts."""
    rank = dist.get_rank()
    given: Any = ([0, 1], [Shard(0)])
    ends: Any = ({"w": torch.zeros(7)}, {"w": torch.zeros(3 + rank)})
    layout: Any = (None, {"w": given})
    if change == "src on one":
        ends = ({"w": torch.zeros(8)}, {"w": torch.zeros(4)} if rank == 0 else None)
    elif change == "dst":
        ends, layout = (ends[1], {"w": torch.zeros(8)}), ({"w": given}, None)
    elif change == "dst, not the source's":
        ends, layout = ({"w": torch.zeros(4 - rank)}, {"w": torch.zeros(8)}), ({"w": given}, None)
    elif change == "dst, own first":
        ends, given = ({"w": torch.zeros(4)}, {"w": torch.ones(8)}), ([rank, 1 - rank], [Shard(0)])
        layout = ({"w": given}, None)
    elif change == "dst on one":
        ends = ({"w": torch.zeros(4)} if rank == 0 else None, {"w": torch.zeros(8)})
        layout = ({"w": given}, None)
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.sync(*ends, layout=layout)
    assert ends[0] is None or not ends[0]["w"].any()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("src", "w: at the mesh coordinates of its layout=, the ranks hold [0]: [3], [1]: [4], "),
        ("src on one", "hold only 4 of the 8 elements"),
        ("dst", "but an even split of shape [7] gives [0]: [4], [1]: [3]. If the split is uneven"),
        (
            "dst, not the source's",
            "at mesh coordinate [1] of its layout=, holds [3], but the source has [8] (",
        ),
        ("dst, own first", "w: the parts that the ranks declare by layout= do not add up"),
        ("dst on one", "w: dst is sharded over 2 ranks, but only 1 of them passed it"),
    ],
)
def test_parts_that_make_no_whole_are_refused_in_sync(change: str, words: str) -> None:
    texts = run_ranks(2, job_no_whole, change)
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
        ([[(0, 1)], [(2, 1)]], ValueError, "a gap before element 2"),
        ([[(0, 2)]], TypeError, "for each position on the only mesh axis that shards"),
        ([[0, 1], [1, 1]], TypeError, "for each position on the only mesh axis that shards"),
    ],
)
def test_intervals_hold_each_element_once(intervals: Any, kind: Any, words: str) -> None:
    given = {"weight": ([0, 1], [Shard(0)], intervals)}
    with pytest.raises(kind, match=words):
        anyrank.load(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), layout=given)


def test_a_mesh_has_each_rank_once() -> None:
    with pytest.raises(
        ValueError, match=r"layout= of weight: its mesh has duplicate ranks, \[0, 0"
    ):
        anyrank.load(nn.Linear(2, 2), {}, layout={"weight": ([0, 0], [Shard(0)])})


def test_the_coordinates_of_a_list_of_ranks_are_those_of_a_mesh() -> None:
    mesh = RankMesh((2, 3), (4, 5, 6, 9, 8, 7))
    assert [mesh.coordinate(rank) for rank in (4, 6, 9, 7, 1)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
        None,
    ]
