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


def write_index(step: Path, index: dict[str, Any]) -> None:
    """An index of tensors, with its checksum in the manifest."""
    data = (json.dumps(index) + "\n").encode()
    (step / "tensors.json").write_bytes(data)
    table = json.loads((step / "anyrank.json").read_text())
    table["files"]["tensors.json"] = {"size": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
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
def test_an_index_with_a_wrong_field_is_refused_or_of_no_account(step: Path, new: Any) -> None:
    index = json.loads((step / "tensors.json").read_text())
    index["tensors"] |= {"model.0.weight": index["tensors"].pop("model.0.weight")}
    first = ("tensors", "model.0.weight")
    some = [where for where in places(index) if where[0] != "tensors" or where[:2] == first]
    for where in some:
        write_index(step, put(index, where, new))
        outcome(step)  # raises any other error


@pytest.mark.parametrize(
    ("where", "new"),
    [
        (("shape",), [10**12]),
        (("chunks", 0, 1), [10**6, 10**6]),
        (("chunks", 0, 3), -(10**12)),
        (("chunks", 0, 2), 10**6),
        (("chunks", 0, 0), [0]),
    ],
)
def test_a_tensor_is_no_larger_than_its_files(step: Path, where: tuple[Any, ...], new: Any) -> None:
    index = json.loads((step / "tensors.json").read_text())
    write_index(step, put(index, ("tensors", "model.0.weight", *where), new))
    with pytest.raises(
        anyrank.CorruptCheckpoint, match=r"tensors\.json: is not what a save writes"
    ):
        resume(step.parent, build())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", 2, "has format version 2, this anyrank reads 1"),
        ("run", "../x", "run: '../x' is not an id of a run"),
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
@pytest.mark.parametrize("field", ["", "blocks"])
def test_a_file_outside_of_the_step_is_damage(step: Path, name: str, field: str) -> None:
    (step.parent / "outside").write_bytes(b"abc")
    table = json.loads((step / "anyrank.json").read_text())
    if field:
        table["files"]["__0_0.distcp"][field] = name
    else:
        table["files"][name] = {"size": 3, "xxh3_64": xxhash.xxh3_64_hexdigest(b"abc")}
    forge(step, table)
    with pytest.raises(anyrank.CorruptCheckpoint, match="lies outside of the step's folder"):
        resume(step.parent, build())
