"""All that stands in a table of weights is read, or named by every call that does not read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import anyrank


class Clip(nn.Module):
    """A module with a part, a list of tensors and a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4))
        self.steps = nn.ParameterList([torch.rand(2), torch.rand(3)])
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("mean", torch.rand(4))


def nested(model: Clip) -> dict[str, Any]:
    """The model's tensors, those of its parts in tables and lists of their own."""
    inner = model.encoder[0].state_dict()
    return {
        "encoder": {"0": inner},
        "steps": [*model.steps],
        "scale": model.scale.detach(),
        "mean": model.get_buffer("mean"),
    }


def legacy(tree: Any, path: Path) -> None:
    torch.save(tree, path, _use_new_zipfile_serialization=False)


WRITERS: list[Callable[[Any, Path], None]] = [torch.save, legacy]
PLACES: dict[str, tuple[Callable[[Any], Any], dict[str, str] | None]] = {
    "root": (lambda table: table, None),
    "model": (lambda table: {"model": table, "epoch": 3}, None),
    "ema": (lambda table: {"ema": table, "model": {"w": torch.ones(1)}}, {"ema": ""}),
    "inner": (lambda table: {"state_dict": {"net": table, "w": torch.ones(1)}}, {"net": ""}),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("place", PLACES)
def test_tables_and_lists_beside_tensors_are_read(
    place: str, write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model, path, out = Clip(), tmp_path / "w.pt", tmp_path / "out.safetensors"
    wrap, rename = PLACES[place]
    write(wrap(nested(model)), path)
    filled = Clip()
    anyrank.load(filled, path, rename=rename, unexpected="ignore")
    for (name, got), (_, want) in zip(
        filled.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(got, want), name
    report = anyrank.convert(path, out, rename=rename)
    noted = {note.partition(":")[0] for note in report.skipped}
    for name in {*model.state_dict()} - {*load_file(out)}:
        assert place == "root"
        assert name.partition(".")[0] == "steps"  # a list beside the weights, as scripts keep some
        assert "steps" in noted
    assert anyrank.diff(path, path).equal >= 5


def test_two_tensors_of_one_key_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}}, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match=r"w\.pt: two tensors have the key a\.b"):
        anyrank.inspect(tmp_path / "w.pt")


def test_extra_state_in_an_inner_table_is_one_value(tmp_path: Path) -> None:
    extra = {"_extra_state": {"amax": torch.ones(2)}, "w": torch.ones(1)}
    torch.save({"model": {"encoder": extra, "scale": torch.ones(())}}, tmp_path / "w.pt")
    found = {t.name: t for t in anyrank.inspect(tmp_path / "w.pt").tensors}
    assert found.keys() == {"encoder.w", "scale"}


@pytest.mark.parametrize("write", [*WRITERS, None])
@pytest.mark.parametrize("place", PLACES)
def test_arrays_among_tensors_are_named(
    place: str, write: Callable[[Any, Path], None] | None, tmp_path: Path
) -> None:
    model, path, out = Clip(), tmp_path / "w.pt", tmp_path / "out.safetensors"
    weights = {**model.state_dict(), "mean": np.full(4, 7.0, np.float32)}
    wrap, rename = PLACES[place]
    source: Any = path
    if write is None:
        if place != "root":
            pytest.skip("a dict in memory holds no tables")
        source = weights
    else:
        write(wrap(weights), path)
    for missing in ("error", "keep", "init"):
        with pytest.raises(anyrank.LoadError, match=r"mean: is an? (NumPy )?array") as failed:
            anyrank.load(Clip(), source, rename=rename, missing=missing, unexpected="ignore")
    with pytest.raises(anyrank.LoadError, match=r"mean: is an? (NumPy )?array"):
        anyrank.convert(source, out, rename=rename)
    others = {"w": torch.ones(1)} if place in ("ema", "inner") else {}
    names = {"ema": "ema.", "inner": "net."}.get(place, "")
    plain = {f"{names}{k}": t for k, t in weights.items() if k != "mean"} | others
    assert not anyrank.diff(source, plain)
    assert place == "ema" or not anyrank.verify(source)
    # The way out that the error gives.
    kept = Clip()
    left_out = {**(rename or {}), "mean" if not names else f"{names}mean": ""}
    anyrank.load(kept, source, rename=left_out, missing="keep", unexpected="ignore")
    assert torch.equal(kept.scale, model.scale)
    anyrank.convert(source, out, rename=left_out)
    assert "drop it with rename=" in str(failed.value)


@pytest.mark.parametrize("value", [0.07, "x", [1, 2], np.float32(2)])  # None is missing
@pytest.mark.parametrize("place", ["root", "model", "memory"])
def test_what_is_no_tensor_is_named_and_never_given_first_values(
    place: str, value: object, tmp_path: Path
) -> None:
    model, path = Clip(), tmp_path / "w.pt"
    weights: dict[str, Any] = {**model.state_dict(), "scale": value}
    source: Any = weights if place == "memory" else path
    if place != "memory":
        torch.save(PLACES[place][0](weights), path)
    with pytest.raises(anyrank.LoadError, match=r"scale: is (not a tensor|a NumPy array|an array)"):
        anyrank.load(Clip(), source, missing="init")
    assert any(note.startswith("scale") for note in anyrank.inspect(source).skipped)
    if not isinstance(value, np.generic):
        report = anyrank.convert(source, tmp_path / "out")
        assert any(note.startswith("scale") for note in report.skipped)


@pytest.mark.parametrize("tree", [{"0": {"weight": torch.ones(4, 4)}}, [torch.ones(4, 4)]])
def test_tensors_inside_an_entry_of_a_dict_in_memory_are_named(tree: Any, tmp_path: Path) -> None:
    source = {"encoder": tree, "scale": torch.ones(())}
    with pytest.raises(anyrank.LoadError, match=r"encoder: is a .* with tensors in it"):
        anyrank.load(Clip(), source, missing="keep")
    with pytest.raises(anyrank.LoadError, match=r"encoder: is a .* with tensors in it"):
        anyrank.convert(source, tmp_path / "out")
    assert not anyrank.verify(source)
    anyrank.load(Clip(), {**Clip().state_dict(), "optimizer": {"state": tree}})


def test_values_beside_the_weights_are_looked_at_by_verify(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.full((2,), float("nan"))}}
    torch.save(tree, tmp_path / "w.pt")
    report = anyrank.verify(tmp_path / "w.pt", finite=True)
    assert [finding.where for finding in report.findings] == ["ema.w"]
    assert report.tensors == 2


def test_states_of_generators_are_no_weights(tmp_path: Path) -> None:
    state = {"numpy": np.random.default_rng(0).integers(9, size=4), "torch": torch.ones(2)}
    tree = {"model": {"w": torch.ones(2)}, "random": {"numpy": ("MT", state["numpy"]), "t": 3}}
    torch.save(tree, tmp_path / "w.pt")
    assert anyrank.verify(tmp_path / "w.pt")
    assert anyrank.diff(tmp_path / "w.pt", tmp_path / "w.pt")
    anyrank.convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_run_that_begins_from_such_a_file_has_it_all_or_names_it(tmp_path: Path) -> None:
    model, other = Clip(), Clip()
    torch.save({"model": nested(model), "step": 3}, tmp_path / "w.pt")
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(model=other)) as ckpts:
        ckpts.resume(tmp_path / "w.pt")
    assert all(
        torch.equal(got, want)
        for got, want in zip(other.state_dict().values(), model.state_dict().values(), strict=True)
    )
    array = {**model.state_dict(), "mean": np.ones(4, np.float32)}
    torch.save({"model": array, "step": 3}, tmp_path / "array.pt")
    with (
        pytest.raises(anyrank.CheckpointError, match=r"mean: is an? (NumPy )?array"),
        anyrank.Checkpoints(tmp_path / "again", anyrank.TrainState(model=Clip())) as ckpts,
    ):
        ckpts.resume(tmp_path / "array.pt")
