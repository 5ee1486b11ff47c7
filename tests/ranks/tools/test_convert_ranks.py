"""`convert` of a live model: all ranks write one set of files, which hold the whole model."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.ranks.parts import Parts, fill, layouts
from tests.ranks.sharded_nets import LAYOUTS, Net, reference
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

import anyrank
from anyrank import faults
from anyrank.testing import run_ranks

SIZES = {"width": 7, "hidden": 9}


def job_convert(folder: str, layouts: list[str]) -> list[Any]:
    reports: list[Any] = []
    for layout in layouts:
        for to in ("safetensors", "dcp", "torch"):
            model = LAYOUTS[layout](reference(**SIZES))
            out = os.path.join(folder, f"{layout}-{to}")
            reports.append(anyrank.convert(model, out, to=to))  # type: ignore[arg-type]
    model = LAYOUTS[layouts[-1]](reference(**SIZES))
    out = os.path.join(folder, "cast")
    reports.append(anyrank.convert(model, out, dtype="bfloat16", shard_bytes=200))
    return reports


CASES = [
    (1, ["plain", "fsdp"]),
    (2, ["plain", "fsdp", "tp", "fsdp_mixed", "fsdp_ignored"]),
    (3, ["fsdp", "tp"]),
    (4, ["hsdp", "fsdp_tp"]),
]


@pytest.mark.parametrize(("ranks", "layouts"), CASES, ids=lambda value: str(value)[:1])
def test_all_ranks_write_the_whole_model(tmp_path: Path, ranks: int, layouts: list[str]) -> None:
    results = run_ranks(ranks, job_convert, str(tmp_path), layouts)
    wanted = reference(**SIZES).state_dict()
    untied = {name: tensor for name, tensor in wanted.items() if name != "head.weight"}
    for layout in layouts:
        single = load_file(tmp_path / f"{layout}-safetensors/model.safetensors")
        assert single.keys() == untied.keys()
        assert all(torch.equal(single[name], untied[name]) for name in untied), layout
        made = torch.load(tmp_path / f"{layout}-torch", weights_only=True)
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)
        assert made["head.weight"].data_ptr() == made["embed.weight"].data_ptr()
        assert anyrank.diff(tmp_path / f"{layout}-dcp", wanted)
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in wanted.items()}
    assert anyrank.diff(tmp_path / "cast", half)
    assert len(list((tmp_path / "cast").glob("*.safetensors"))) > 2
    assert not list(tmp_path.glob("*.unfinished-*"))
    for reports in results:
        assert [r.files for r in reports] == [r.files for r in results[0]]
        assert reports[0].tied == {"head.weight": "embed.weight"}


def job_refuse(folder: str) -> list[str]:
    rank, said = dist.get_rank(), list[str]()

    def attempt(work: Any) -> None:
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    model: Any = fully_shard(Net())
    attempt(lambda: anyrank.convert(model, f"{folder}/{rank}"))
    attempt(lambda: anyrank.convert(model, f"{folder}/a", to="nothing"))  # type: ignore[arg-type]
    attempt(lambda: anyrank.convert(model, folder))
    wrong = "int8" if rank else None
    attempt(lambda: anyrank.convert(model, f"{folder}/a", dtype=wrong))
    attempt(lambda: anyrank.convert(model, 3 if rank else f"{folder}/a"))  # type: ignore[arg-type]
    attempt(lambda: anyrank.convert(model, f"{folder}/a", model=model if rank else None))
    group: Any = dist.group.WORLD
    src = folder if rank else model
    attempt(lambda: anyrank.convert(src, f"{folder}/a", process_group=group))
    none: Any = None if rank else model
    attempt(lambda: anyrank.convert(none, f"{folder}/a", process_group=group))

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        faults.armed["file.write"] = refuse
    attempt(lambda: anyrank.convert(model, f"{folder}/full"))
    faults.armed.clear()
    alike = nn.Linear(4, 4)
    with torch.no_grad():
        alike.weight.fill_(rank)
        alike.bias.fill_(0)
    attempt(lambda: anyrank.convert(alike, f"{folder}/differ"))
    attempt(lambda: anyrank.convert(nn.Linear(4, 4 + rank), f"{folder}/shapes"))
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
    said += anyrank.convert(norm, f"{folder}/norm").skipped
    return said


def job_left_out(folder: str, layout: str) -> list[list[str]]:
    """Leave out a name of a tie and a buffer, mistype another name, and refuse a pipe."""
    skipped: list[list[str]] = []
    for to in ("safetensors", "dcp", "torch"):
        rename = {"embed.weight": "", "blocks.1.count": "", "blocks.0": "first", "head.wieght": ""}
        out: Any = os.path.join(folder, f"{layout}-{to}")
        model = LAYOUTS[layout](reference(**SIZES))
        skipped.append(anyrank.convert(model, out, to=to, rename=rename).skipped)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pipe: is neither a file nor a folder"):
            anyrank.convert(model, os.path.join(folder, "pipe"), to=to, overwrite=True)  # type: ignore[arg-type]
    return skipped


@pytest.mark.parametrize("layout", ["plain", "fsdp", "tp"])
def test_what_rename_empties_is_left_out_by_all_ranks(tmp_path: Path, layout: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    wanted = {
        name.replace("blocks.0", "first"): tensor
        for name, tensor in reference(**SIZES).state_dict().items()
        if name not in ("blocks.1.count", "embed.weight")
    }
    for notes in run_ranks(2, job_left_out, str(tmp_path), layout):
        for skipped in notes:
            assert "embed.weight: rename= leaves it out" in skipped
            assert (
                "head.wieght: this entry of rename= matches no key (near: head.weight)" in skipped
            )
            assert "blocks.1.count: rename= leaves it out" in skipped
    for to in ("safetensors", "dcp", "torch"):
        report = anyrank.diff(tmp_path / f"{layout}-{to}", wanted)
        assert report, report
        assert not report.tied
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def job_path_first(folder: str) -> None:
    if dist.get_rank() == 0:
        anyrank.convert(f"{folder}/source.pt", f"{folder}/path")
        time.sleep(2.5)  # the others wait for it meanwhile
    anyrank.convert(Net(), f"{folder}/model")


def test_a_path_by_one_rank_and_then_a_model_by_all(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "source.pt")
    run_ranks(2, job_path_first, str(tmp_path))
    assert {"path", "model"} <= set(os.listdir(tmp_path))


def test_one_ranks_refusal_is_every_ranks(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    results = run_ranks(2, job_refuse, str(tmp_path))
    for said in results:
        assert said[0].startswith("LoadError: ")
        assert "dst" in said[0]
        assert said[1].startswith("WrongValue: ")
        assert "already exists" in said[2]
        assert said[3].startswith("WrongValue: ")
        assert "dtype='int8'" in said[3]
        assert said[4].startswith("WrongType: ")
        assert said[5].startswith("WrongValue: ")
        assert "model= is only for a source on disk" in said[5]
        assert said[6].startswith("WrongValue: ")
        assert "process_group= is only for a model" in said[6]
        assert said[7].startswith("WrongType: ")
        del said[3:8]
        assert said[3].startswith("CheckpointError: ")
        assert "No space left" in said[3]
        assert "differ" in said[4]
        assert "rank 1" in said[5]
        assert said[6] == "running_mean: differs between ranks; that of the first rank was written"
    assert sorted(os.listdir(tmp_path)) == ["norm", "there"]
    assert torch.equal(
        load_file(tmp_path / "norm/model.safetensors")["running_mean"], torch.zeros(2)
    )


def job_other_ties(folder: str) -> str:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    with torch.no_grad():
        for layer in model.values():
            nn.init.ones_(layer.get_parameter("weight"))
    model["c"].weight = model["ab"[dist.get_rank()]].weight
    with pytest.raises(anyrank.LoadError) as failed:
        anyrank.convert(model, os.path.join(folder, "out"))
    return str(failed.value)


def test_other_ties_on_other_ranks_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_other_ties, str(tmp_path))
    assert first == second
    assert "c.weight= differs between ranks: 'a.weight' on rank 0, 'b.weight' on rank 1" in first
    assert not any(tmp_path.iterdir())


def job_parts(folder: str) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, layout = Parts(rank, size), layouts(range(size), size)
    fill(model, 7, rank, size)
    for to in ("safetensors", "dcp", "torch"):
        anyrank.convert(model, os.path.join(folder, to), to=to, layout=layout)
    errors: list[str] = []
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.convert(model, os.path.join(folder, "wrong"))
    errors.append(str(caught.value))
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.convert(nn.Linear(2, 2, bias=rank > 0), os.path.join(folder, "wrong"))
    errors.append(str(caught.value))
    unlike = nn.Module()
    if rank:
        unlike.scale = nn.Parameter(torch.ones(2))
    else:
        unlike.register_buffer("scale", torch.ones(2))
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.convert(unlike, os.path.join(folder, "wrong"))
    return [*errors, str(caught.value)]


def test_plain_parts_are_written_whole(tmp_path: Path) -> None:
    texts = run_ranks(3, job_parts, str(tmp_path))
    wanted = Parts()
    fill(wanted, 7)
    for to in ("safetensors", "dcp", "torch"):
        assert anyrank.diff(tmp_path / to, wanted.state_dict()), to
    for text in texts:
        assert text == texts[0]
        assert "the ranks' models differ" in text[0]
        assert "rank 0 has no other tensor, but rank 1 has bias [2] torch.float32" in text[1]
        assert "rank 0 has scale [2] torch.float32 (may differ, because it is a buffer" in text[2]
    assert not (tmp_path / "wrong").exists()


def test_layout_is_for_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout= is only for a model"):
        anyrank.convert({"a": torch.ones(2)}, tmp_path / "a", layout={"a": ([0], [Replicate()])})
    with pytest.raises(TypeError, match="expected \\(mesh, placements\\)"):
        anyrank.convert(nn.Linear(2, 2), tmp_path / "a", layout={"weight": ([0], None)})


class WithExtra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.full((2,), float(dist.get_rank()))

    def set_extra_state(self, state: torch.Tensor) -> None: ...


def job_extra(folder: str) -> list[str]:
    model = fully_shard(nn.Sequential(WithExtra(2, 2)))
    return anyrank.convert(model, f"{folder}/out").skipped


def test_extra_state_is_written_as_the_first_rank_has_it(tmp_path: Path) -> None:
    notes = run_ranks(2, job_extra, str(tmp_path))
    assert notes[0] == ["0._extra_state: differs between ranks; that of the first rank was written"]
    assert load_file(tmp_path / "out/model.safetensors")["0._extra_state"].tolist() == [0.0, 0.0]
