"""Runs whose checksums are right and whose contents are not: refused by an error of anyrank's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from tests.runs import forge, resume, save
from torch import nn

import anyrank

WRONG: list[Any] = [..., None, "x", {"~x": 1}]


class Tracker:
    """A stateful object with every kind of plain value."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "list": [1, (2.0, None)],
            "tensor": torch.ones(3),
            "nested": {"x": {1: "y"}, "set": {3}, "bytes": b"z"},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": 1.0, "history": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        del state


def build() -> anyrank.TrainState:
    torch.manual_seed(0)
    net = nn.Sequential(Extra(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return anyrank.TrainState(net, optimizer, scheduler=schedule, tracker=Tracker())


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save(tmp_path, build())
    return tmp_path / "step-00000000"


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if where:
        yield where
    items = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else items:
        yield from places(item, (*where, key))


def put(value: Any, where: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place; `...` for none."""
    copied = json.loads(json.dumps(value))
    inner = copied
    for key in where[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[where[-1]]
    else:
        inner[where[-1]] = new
    return copied


def write_index(step: Path, index: dict[str, Any], name: str = "tensors.json") -> None:
    """An index of the step, or of its first rank, with its checksum in the manifest."""
    data = (json.dumps(index) + "\n").encode()
    (step / name).write_bytes(data)
    table = json.loads((step / "anyrank.json").read_text())
    checksum = xxhash.xxh3_64_hexdigest(data)
    if name == "tensors.json":
        table["files"][name] = {"size": len(data), "xxh3_64": checksum}
    else:
        table["ranks"][0][1:] = [len(data), checksum]
    forge(step, table)


kept: list[anyrank.TrainState] = []  # a resume that fails leaves a state that can be resumed


def outcome(step: Path) -> str:
    """What a resume says: nothing, or the class of its error."""
    state = kept.pop() if kept else build()
    with anyrank.Checkpoints(step.parent, state) as ckpts:
        try:
            ckpts.resume()
            return ""
        except anyrank.CorruptCheckpoint:
            for aside in step.parent.glob(".aside-*"):
                aside.rename(step)
            said = "corrupt"
        except anyrank.CheckpointError:
            said = "refused"
    kept.append(state)
    return said


@pytest.mark.parametrize("new", WRONG, ids=repr)
def test_a_manifest_with_a_wrong_field_is_refused_or_of_no_account(step: Path, new: Any) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    for where in places(table):
        forge(step, put(table, where, new))
        outcome(step)  # raises any other error


@pytest.mark.parametrize("new", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["tensors.json", "__0_0.json"])
def test_an_index_with_a_wrong_field_is_refused_or_of_no_account(
    step: Path, name: str, new: Any
) -> None:
    index = json.loads((step / name).read_text())
    key = "tensors" if name == "tensors.json" else "boxes"
    some = [where for where in places(index) if where[0] != key or where[1:2] in ((), (0,), (5,))]
    assert len(some) > 10
    for where in some:
        write_index(step, put(index, where, new), name)
        outcome(step)  # raises any other error


SHARD = {"shape": [1], "places": [0]}


def laid_out(step: Path, mesh: Any = SHARD, placement: Any = ("shard", 0, 1)) -> None:
    """The first tensor's layout is this one, in a step that one rank saved."""
    index = json.loads((step / "tensors.json").read_text())
    index["meshes"] = [mesh]
    index["layouts"] = [{"mesh": 0, "placements": [placement]}]
    index["tensors"][0][3] = 0
    write_index(step, index)


@pytest.mark.parametrize("part", [[], [0, 1], [0, 10**12]], ids=str)
def test_a_layout_says_which_ranks_are_looked_at_and_no_more(step: Path, part: list[int]) -> None:
    """What lies where is in the ranks' indexes, which are compared with their files."""
    laid_out(step)
    assert outcome(step) == ""
    laid_out(step, placement=("intervals", 0, [[part] if part else []]))
    assert outcome(step) == ("" if part else "corrupt")


@pytest.mark.parametrize(
    "mesh",
    [
        {"shape": [10**9], "places": [0]},
        {"shape": [2], "places": [0]},
        {"shape": [0], "places": [0]},
        {"shape": [1] * 10**5, "places": [0]},
        {"shape": [1], "places": [1]},
        {"shape": [1], "places": [0, 0]},
        {"shape": [1], "places": []},
        {"shape": [1], "places": [True]},
        {"shape": [], "places": [0]},
    ],
    ids=lambda mesh: str(mesh)[:40],
)
def test_a_mesh_has_no_other_ranks_than_saved(step: Path, mesh: Any) -> None:
    laid_out(step, mesh)
    assert outcome(step) == "corrupt"


@pytest.mark.parametrize(
    "placement",
    [
        ("shard", 0, 10**9),
        ("shard", 0, 0),
        ("shard", 9, 1),
        ("shard", 0),
        ("replicate",),
        ("intervals", 0, []),
        ("intervals", 0, [[[0, 2]], [[0, 2]]]),
        ("partial",),
    ],
    ids=str,
)
def test_a_layout_that_no_save_writes_is_refused(step: Path, placement: Any) -> None:
    laid_out(step, placement=placement)
    assert outcome(step) == "corrupt"


@pytest.mark.parametrize(
    ("where", "new"),
    [
        ((0, 2), [10**12]),
        ((0, 2), [10**6, 10**6]),
        ((0, 3), [7]),
        ((0, 3), [-1]),
        ((0, 3), 3),
        ((0, 0), "model.0.bias"),
        ((0, 1), "Tensor"),
    ],
)
def test_a_tensor_is_no_larger_than_its_files(step: Path, where: tuple[Any, ...], new: Any) -> None:
    index = json.loads((step / "tensors.json").read_text())
    write_index(step, put(index, ("tensors", *where), new))
    with pytest.raises(
        anyrank.CorruptCheckpoint, match=r"tensors\.json: is not valid anyrank data"
    ):
        resume(step.parent, build())


@pytest.mark.parametrize(
    ("where", "new"),
    [
        ((0, 2), [10**6, 10**6]),
        ((0, 3), -(10**12)),
        ((0, 3), 10**12),
        ((0, 0), 10**6),
        ((0, 0), -1),
        ((0, 1), [0]),
        ((0, 1), [1, 1]),
    ],
)
def test_a_piece_lies_in_its_tensor_and_its_file(
    step: Path, where: tuple[Any, ...], new: Any
) -> None:
    index = json.loads((step / "__0_0.json").read_text())
    write_index(step, put(index, ("boxes", *where), new), "__0_0.json")
    with pytest.raises(anyrank.CorruptCheckpoint, match=r"__0_0\.json: is not valid anyrank data"):
        resume(step.parent, build())


@pytest.mark.parametrize("how", ["lost", "moved"])
def test_pieces_that_do_not_make_up_a_tensor_are_refused(step: Path, how: str) -> None:
    index = json.loads((step / "__0_0.json").read_text())
    number, offsets, sizes, offset = index["boxes"][0]
    assert sizes == [2, 2]
    half = [number, offsets, [1, 2], offset]
    other = [number, [1, 0], [1, 2], offset + 8]
    index["boxes"][:1] = {"lost": [half], "moved": [half, other, half]}[how]
    write_index(step, index, "__0_0.json")
    assert outcome(step) != ""
    with pytest.raises(anyrank.AnyrankError):
        anyrank.convert(step, step.parent / "out", to="safetensors")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", 2, "has format version 2, but this anyrank reads version 1"),
        ("run", "../x", "run: '../x' is not a run id"),
    ],
)
def test_a_wrong_field_is_named(step: Path, field: str, value: Any, said: str) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    forge(step, table | {field: value})
    with pytest.raises(anyrank.CheckpointError, match=said) as caught:
        resume(step.parent, build())
    if field == "version":  # a newer anyrank reads it
        assert not isinstance(caught.value, anyrank.CorruptCheckpoint)
        assert step.is_dir()


@pytest.mark.parametrize("name", ["../outside", "..", "/etc/hosts", "a/b"])
def test_a_file_outside_of_the_step_is_damage(step: Path, name: str) -> None:
    (step.parent / "outside").write_bytes(b"abc")
    table = json.loads((step / "anyrank.json").read_text())
    table["files"][name] = {"size": 3, "xxh3_64": xxhash.xxh3_64_hexdigest(b"abc")}
    forge(step, table)
    with pytest.raises(anyrank.CorruptCheckpoint, match="is outside the step's folder"):
        resume(step.parent, build())
