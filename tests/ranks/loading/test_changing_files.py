"""Files that are written to while ranks read them, and copies that are not the same file."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyrank
from anyrank import faults
from anyrank.files.local import LocalFile
from anyrank.testing import RanksFailed, run_ranks

WIDTH = 32
LAYERS = 4
CUT_WIDTH = 512
CUT_BYTES = 64 << 10


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(t, value) for key, t in net().state_dict().items()}


def write(form: str, folder: str, value: float) -> str:
    """A file or folder with these weights, in place of one that is there."""
    state = weights(value)
    path = f"{folder}/w"
    if form == "pt":
        torch.save(state, f"{path}.pt")
        return f"{path}.pt"
    if form == "dcp":
        dcp_save(state, checkpoint_id=path, no_dist=True)
        return path
    os.makedirs(path, exist_ok=True)
    save_file(state, f"{path}/new")
    with open(f"{path}/new", "rb") as new, open(f"{path}/model.safetensors", "ab") as old:
        old.truncate(0)
        old.write(new.read())
    os.remove(f"{path}/new")
    return path


def job_changed(path: str, folder: str, form: str, strategy: str, wrap: str) -> str:
    """The first rank's first progress stands for a training job that saves there again."""
    rank = torch.distributed.get_rank()
    calls: list[int] = []

    def saves_again(done: int, total: int) -> None:
        if not calls:
            calls.append(done)
            write(form, folder, 2.0)

    if wrap == "meta":
        with anyrank.meta():
            model = net()
    else:
        model = net()
    model = fully_shard(model)
    progress: Any = saves_again if rank == 0 else None
    with pytest.raises(anyrank.LoadError, match="changed while it was read") as caught:
        anyrank.load(model, path, strategy=strategy, progress=progress)  # type: ignore[arg-type]
    assert wrap != "meta" or all(p.is_meta for p in model.parameters())
    return type(caught.value).__name__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "strategy", "wrap"),
    [
        ("pt", "own", "meta"),
        ("safetensors", "own", "real"),
        ("dcp", "own", "real"),
        ("safetensors", "scatter", "meta"),
        ("pt", "stripe", "real"),
    ],
)
def test_a_file_that_is_written_while_it_is_read_is_an_error_on_all_ranks(
    form: str, strategy: str, wrap: str, tmp_path: Path
) -> None:
    path = write(form, str(tmp_path), 1.0)
    for name in Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]:
        os.utime(name, (1, 1))  # so that no clock is too coarse for the second save
    names = run_ranks(2, job_changed, path, str(tmp_path), form, strategy, wrap)
    assert names == ["LoadError"] * 2


def job_cut(path: str, kind: str, by_writer: bool) -> str:
    """A thread stands for another process that cuts the file off in the middle of a load."""
    cuts: list[threading.Thread] = []
    writer = os.open(path, os.O_RDWR) if by_writer else None  # which has it open since before

    def then_cut(method: Any) -> Any:
        def call(*args: Any) -> Any:
            result = method(*args)
            if result is not None and not cuts:
                cuts.append(threading.Thread(target=os.truncate, args=(path, CUT_BYTES)))
                cuts[0].start()
                cuts[0].join(0.2)  # it is done at once, or waits for the end of the copy
            return result

        return call

    model: Any = nn.Linear(CUT_WIDTH, CUT_WIDTH, bias=False)
    if kind == "cast":
        model = model.double()
    if torch.distributed.get_world_size() > 1 and kind != "whole":
        dim = int(kind == "columns")
        model = fully_shard(model, shard_placement_fn=lambda parameter: Shard(dim))
    with pytest.MonkeyPatch.context() as patch:

        def at_open() -> None:  # the headers have been read
            for name in ("mapped", "readv"):
                patch.setattr(LocalFile, name, then_cut(getattr(LocalFile, name)))

        patch.setitem(faults.armed, "load.open", at_open)
        found = ""
        try:
            anyrank.load(model, path)
        except anyrank.LoadError as error:
            found = str(error)
    if found:
        assert re.search("truncated or was changed|changed while it was", found)
    else:  # who would cut the file has waited until all was read
        assert not by_writer
        assert all(bool((p == 1).all()) for p in model.parameters())
    cuts[0].join()
    if writer is not None:
        os.close(writer)
    return "went on"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by_writer", [False, True])
@pytest.mark.parametrize("kind", ["rows", "columns", "view", "whole", "cast"])
def test_a_file_that_is_cut_off_in_the_middle_of_a_load_ends_no_rank(
    kind: str, by_writer: bool, ranks: int, tmp_path: Path
) -> None:
    both = torch.ones(CUT_WIDTH, 2 * CUT_WIDTH)
    weight = both[:, CUT_WIDTH:]
    if kind == "view":  # columns for all ranks
        path = tmp_path / "w.pt"
        torch.save({"weight": weight}, path)
    else:
        path = tmp_path / "w.safetensors"
        save_file({"weight": weight.contiguous()}, path)
    assert run_ranks(ranks, job_cut, str(path), kind, by_writer) == ["went on"] * ranks


def test_a_conversion_of_a_file_that_changes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyrank.tools.convert.content import StoredContent

    path = write("pt", str(tmp_path), 1.0)
    os.utime(path, (1, 1))
    fill = StoredContent.fill

    def fill_and_save(self: StoredContent, pieces: Any) -> None:
        fill(self, pieces)
        write("pt", str(tmp_path), 2.0)

    monkeypatch.setattr(StoredContent, "fill", fill_and_save)
    with pytest.raises(anyrank.LoadError, match="changed while it was read"):
        anyrank.convert(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["w.pt"]


def job_own_folder(folder: str, name: str) -> Any:
    """Each rank's working directory stands for its machine's disk."""
    model = fully_shard(net())
    here = os.getcwd()
    os.chdir(f"{folder}/{torch.distributed.get_rank()}")
    try:
        anyrank.load(model, name)
    finally:
        os.chdir(here)
    return {x for p in model.parameters() for x in p.to_local().unique().tolist()}  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_copies_that_differ_in_one_tensor_under_one_header_and_time_are_told_apart(
    form: str, tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    first = write(form, str(tmp_path / "0"), 1.0)
    name = os.path.basename(first)
    second = tmp_path / "1" / name
    (shutil.copytree if os.path.isdir(first) else shutil.copy)(first, second)
    everything = [first, second]
    files = [p for top in everything for p in (Path(top), *Path(top).rglob("*")) if p.is_file()]
    for path in files:
        os.utime(path, (1, 1))
    assert run_ranks(2, job_own_folder, str(tmp_path), name) == [{1.0}] * 2
    [data] = [p for p in files if str(p).startswith(str(second)) and p.stat().st_size > 10_000]
    content = data.read_bytes()
    middle = torch.ones(WIDTH * WIDTH).numpy().tobytes()
    start = content.index(middle, content.index(middle) + 1)  # of another tensor than the first
    other = 3 * torch.ones(WIDTH * WIDTH)
    data.write_bytes(content[:start] + other.numpy().tobytes() + content[start + len(middle) :])
    os.utime(data, (1, 1))
    with pytest.raises(RanksFailed, match="differs from the file whose header was read on another"):
        run_ranks(2, job_own_folder, str(tmp_path), name)
