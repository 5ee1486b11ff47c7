"""A module that is registered under two names is one tie for each of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import anyrank

KEYS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def build() -> Any:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.ReLU(), shared)


def stored(kind: str, weights: dict[str, torch.Tensor], folder: Path) -> Any:
    if kind == "dict":
        return weights
    if kind == "pt":
        torch.save(weights, folder / "w.pt")
    else:
        save_file(
            {key: tensor.clone() for key, tensor in weights.items()}, folder / "w.safetensors"
        )
    return folder / ("w.pt" if kind == "pt" else "w.safetensors")


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("kind", ["dict", "pt", "safetensors"])
@pytest.mark.parametrize("held", [("0", "2"), ("0",), ("2",)])
def test_a_source_may_hold_either_name_or_both(
    tmp_path: Path, held: tuple[str, ...], kind: str, on_meta: bool
) -> None:
    state = build().state_dict()
    assert list(state) == KEYS
    weights = {key: tensor for key, tensor in state.items() if key[0] in held}
    with torch.device("meta" if on_meta else "cpu"):
        model = build()
    report = anyrank.load(model, stored(kind, weights, tmp_path))
    assert model[0] is model[2]
    assert torch.equal(model[0].weight, state["0.weight"])
    assert report.tied == {"0.weight": ["2.weight"], "0.bias": ["2.bias"]}
    assert report.tensors == 2
    assert not report.unexpected
    assert not anyrank.plan(build(), weights).unexpected


def test_two_values_under_its_names_are_an_error_as_for_tied_tensors() -> None:
    weights = {key: torch.randn_like(tensor) for key, tensor in build().state_dict().items()}
    with pytest.raises(
        anyrank.LoadError, match=r"0\.weight, 2\.bias and 0\.bias are tied in the model"
    ):
        anyrank.load(build(), weights)
    model = build()
    anyrank.load(model, weights, rename={"0.weight": "", "0.bias": ""})
    assert torch.equal(model[0].weight, weights["2.weight"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_converted_live_model_has_every_name_that_torch_asks_for(tmp_path: Path, to: str) -> None:
    model = build()
    path = tmp_path / ("w.pt" if to == "torch" else "w")
    report = anyrank.convert(model, path, to=to)
    assert report.tied == {"2.weight": "0.weight", "2.bias": "0.bias"}
    other = build()
    if to == "torch":
        other.load_state_dict(torch.load(path))
    else:
        state = other.state_dict()
        dcp.load(state, checkpoint_id=path)
    assert torch.equal(other[0].weight, model[0].weight)
    assert anyrank.diff(model.state_dict(), path)


def test_a_conversion_by_a_model_takes_it_for_a_tie(tmp_path: Path) -> None:
    model = build()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=build())
    anyrank.load(other := build(), tmp_path / "out")
    assert torch.equal(other[0].bias, model[0].bias)


def test_it_syncs_with_models_that_have_it_once_or_twice() -> None:
    src = build()
    untied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    anyrank.sync(untied, src)
    assert torch.equal(untied[2].weight, src[0].weight)
    for source in (untied, src, untied.state_dict()):
        with torch.device("meta"):
            dst = build()
        anyrank.sync(dst, source)
        assert torch.equal(dst[0].weight, src[0].weight)


def test_a_run_saves_it_under_both_names_and_resumes(tmp_path: Path) -> None:
    model = build()
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    names = [held.name.removeprefix("model.") for held in anyrank.inspect(tmp_path).tensors]
    assert sorted(names) == sorted(KEYS)
    others: tuple[Any, ...] = (build(), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    for other in others:
        with anyrank.Checkpoints(tmp_path, anyrank.TrainState(other)) as ckpts:
            if other[0] is other[2]:
                ckpts.resume("must")
                assert torch.equal(other[2].weight, model[2].weight)
        anyrank.load(other, tmp_path)
        assert torch.equal(other[2].weight, model[2].weight)


def test_its_first_values_are_those_of_a_module_that_is_registered_once() -> None:
    with torch.device("meta"):
        once, twice = nn.Sequential(nn.Linear(3, 3)), build()
    for model in (once, twice):
        torch.manual_seed(0)
        anyrank.materialize(model, device="cpu")
    assert torch.equal(once[0].weight, twice[2].weight)


class Counting(nn.Linear):
    """Its extra state counts."""

    count = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("apart", [False, True])
def test_its_extra_state_is_handed_over_under_any_of_its_names(apart: bool) -> None:
    def make() -> Any:
        shared = Counting(2, 2)
        inner = nn.Sequential(shared) if apart else shared
        return nn.Sequential(shared, inner)

    saved, model = make(), make()
    saved[0].count = 4
    state = saved.state_dict()
    anyrank.load(model, state)
    assert torch.equal(model[0].weight, saved[0].weight)
    assert model[0].count == 4
    second = "1.0" if apart else "1"
    del state["0._extra_state"]
    model[0].count = 0
    anyrank.load(model, state)
    assert model[0].count == 4, f"it stands under {second} as well"


class Wrap(nn.Module):
    """A wrapper with a weight of its own, whose inner module is called as torch's wrappers do."""

    def __init__(self, name: str, tied: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 5.0))
        inner = nn.Linear(2, 2, bias=False)
        nn.init.constant_(inner.weight, 9.0)
        if tied:
            inner.weight = self.weight
        setattr(self, name, inner)


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_two_tensors_of_one_name_but_for_a_wrappers_are_refused(name: str, tmp_path: Path) -> None:
    model, fine = Wrap(name), Wrap("inner")
    words = (
        rf"weight and {name}\.weight have the same name, weight, without the prefixes of torch's"
    )
    calls: list[Any] = [
        lambda: anyrank.load(model, fine.state_dict()),
        lambda: anyrank.convert(model, tmp_path / "out"),
        lambda: anyrank.sync(Wrap(name), {"weight": torch.ones(2, 2)}),
        lambda: anyrank.sync({"weight": torch.ones(2, 2)}, model),
        lambda: anyrank.materialize(model),
        lambda: anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(model)).save(),
    ]
    for call in calls:
        with pytest.raises(anyrank.AnyrankError, match=words):
            call()
    assert not (tmp_path / "out").exists()
    anyrank.load(Wrap(name, tied=True), {"weight": torch.ones(2, 2)})
    anyrank.sync(Wrap("inner"), fine)
