"""Runs whose checksums are right and whose contents are not: refused by an error of anyrank's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from tests.runs import resume, save
from torch import nn

import anyrank

WRONG: list[Any] = [None, True, -1, 1.5, "x", "", [], [1], {}, {"~x": 1}, {"x": None}, 10**30]


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


def write(step: Path, table: dict[str, Any]) -> None:
    """A manifest with its own checksum."""
    table = {key: value for key, value in table.items() if key != "self"}
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    table["self"] = xxhash.xxh3_128(text.encode()).hexdigest()
    (step / "anyrank.json").write_text(json.dumps(table, indent=1) + "\n")


def write_index(step: Path, index: dict[str, Any]) -> None:
    """An index of tensors, with its checksum in the manifest."""
    data = (json.dumps(index) + "\n").encode()
    (step / "tensors.json").write_bytes(data)
    table = json.loads((step / "anyrank.json").read_text())
    table["files"]["tensors.json"] = {"size": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
    write(step, table)


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


@pytest.mark.parametrize("new", [..., *WRONG], ids=repr)
def test_a_manifest_with_a_wrong_field_is_refused_or_of_no_account(step: Path, new: Any) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    (step / "anyrank.json.good").write_text(json.dumps(table))
    said: dict[tuple[Any, ...], str] = {}
    for where in places(table):
        if where != ("self",):
            write(step, put(table, where, new))
            said[where] = outcome(step)
    free = ("parts", "streams", "differed", "versions", "written", "saved_on", "run", "lineage")
    for where, one in said.items():
        same = where == ("version",) and new is True  # which is 1
        if where[0] not in free and where != ("files", ".metadata") and not same:
            assert one, where


@pytest.mark.parametrize("new", [..., *WRONG], ids=repr)
def test_an_index_with_a_wrong_field_is_refused_or_of_no_account(step: Path, new: Any) -> None:
    index = json.loads((step / "tensors.json").read_text())
    index["tensors"] |= {"model.0.weight": index["tensors"].pop("model.0.weight")}
    first = ("tensors", "model.0.weight")
    some = [where for where in places(index) if where[0] != "tensors" or where[:2] == first]
    for where in some:
        write_index(step, put(index, where, new))
        outcome(step)  # raises any other error


def test_a_piece_outside_of_its_tensor_is_damage(step: Path) -> None:
    index = json.loads((step / "tensors.json").read_text())
    where = ("tensors", "model.0.weight", "chunks", 0, 0, 1)
    write_index(step, put(index, where, 1))
    with pytest.raises(anyrank.CorruptCheckpoint, match=r"a piece at \[0, 1\] of .* is not in"):
        resume(step.parent, build())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", "1", "has format version '1', this anyrank reads 1"),
        ("version", 2, "has format version 2, this anyrank reads 1"),
        ("samples", "many", "samples: 'many' is not a count"),
        ("parts", [], "parts: "),
        ("run", "../x", "run: '../x' is not an id of a run"),
        ("run", "", "run: '' is not an id of a run"),
    ],
)
def test_a_wrong_field_is_named(step: Path, field: str, value: Any, said: str) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    write(step, table | {field: value})
    with pytest.raises(anyrank.CheckpointError, match=said) as caught:
        resume(step.parent, build())
    if field == "version":  # a newer anyrank reads it
        assert not isinstance(caught.value, anyrank.CorruptCheckpoint)
        assert step.is_dir()


def train(path: Path) -> anyrank.TrainState:
    """A state whose loader has counted two steps, and which is saved."""
    torch.manual_seed(0)
    net = nn.Linear(1, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.ones(12, 1), global_batch=4, microbatch=2)
    noise = {"noise": torch.Generator()}
    state = anyrank.TrainState(net, optimizer, data=loader, generators=noise)
    with anyrank.Checkpoints(path, state) as ckpts:
        if ckpts.resume() is None:
            for each in ckpts.steps(until=2):
                for batch in each.microbatches(net):
                    each.backward(net(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return state


@pytest.mark.parametrize(
    ("where", "new", "said"),
    [
        (("parts", "optimizer", "groups", 0, "options", "lr"), "x", "the learning rate 'x'"),
        (("parts", "optimizer", "groups", 0, "options"), {}, "no learning rate"),
        (("parts", "data", "tree"), {}, "data position"),
        (("parts", "data", "tree"), None, "is not a state_dict"),
    ],
)
def test_a_part_that_cannot_read_its_record_is_refused(
    tmp_path: Path, where: tuple[Any, ...], new: Any, said: str
) -> None:
    train(tmp_path)
    (step,) = tmp_path.glob("step-*")
    write(step, put(json.loads((step / "anyrank.json").read_text()), where, new))
    with pytest.raises(anyrank.CorruptCheckpoint, match=said):
        train(tmp_path)
    assert [path.name for path in tmp_path.glob(".aside-damaged-*")]


def test_hyperparameters_of_another_kind_do_not_fit(step: Path) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    where = ("parts", "optimizer", "groups", 0, "options", "betas")
    write(step, put(table, where, "x"))
    with pytest.raises(anyrank.CheckpointError, match="group 0 has betas 'x' in the checkpoint"):
        resume(step.parent, build())


@pytest.mark.parametrize("record", [{"size": 3}, {"size": 3, "xxh3_64": ""}, {"blocks": "x"}])
def test_a_file_without_a_checksum_is_damage(step: Path, record: dict[str, Any]) -> None:
    table = json.loads((step / "anyrank.json").read_text())
    size = table["files"]["__0_0.distcp"]["size"]
    files = table["files"] | {"__0_0.distcp": record | {"size": size}}
    write(step, table | {"files": files})
    assert outcome(step) == "corrupt"


@pytest.mark.parametrize("name", ["../outside", "", "..", "/etc/hosts", "a/b"])
def test_a_file_outside_of_the_step_is_damage(step: Path, name: str) -> None:
    (step.parent / "outside").write_bytes(b"abc")
    table = json.loads((step / "anyrank.json").read_text())
    record = {"size": 3, "xxh3_64": xxhash.xxh3_64_hexdigest(b"abc")}
    write(step, table | {"files": table["files"] | {name: record}})
    with pytest.raises(anyrank.CorruptCheckpoint, match="is not a file of the step's folder"):
        resume(step.parent, build())


@pytest.mark.parametrize("name", ["anyrank.json", "tensors.json", "__0_0.distcp", "__0_0.xxh3"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_pipe_in_a_files_place_is_damage_and_blocks_nothing(
    step: Path, name: str, verify: bool
) -> None:
    (step / name).unlink()
    os.mkfifo(step / name)
    with pytest.raises(anyrank.CheckpointError):
        resume(step.parent, build(), verify=verify)
    for aside in step.parent.glob(".aside-*"):
        shutil.rmtree(aside)
