"""Parametrized modules: filled from a source that holds them, else refused by name."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, prune

import anyrank

KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": lambda m: parametrizations.orthogonal(m, use_trivialization=False),
}


def net(change: Callable[[Any], nn.Module]) -> Any:
    return nn.Sequential(nn.Sequential(change(nn.Linear(4, 4))), nn.BatchNorm1d(4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_holds_them_fills_them(kind: str) -> None:
    source = net(KINDS[kind])
    with anyrank.meta():
        model = net(KINDS[kind])
    anyrank.load(model, source.state_dict())
    assert torch.equal(model[0][0].weight, source[0][0].weight)


@pytest.mark.parametrize("call", ["materialize", "plan"])
@pytest.mark.parametrize("kind", KINDS)
def test_first_values_are_refused_by_name_and_nothing_is_changed(kind: str, call: str) -> None:
    with anyrank.meta():
        model = net(KINDS[kind])
    calls: dict[str, Callable[[], object]] = {
        "materialize": lambda: anyrank.materialize(model, device="cpu"),
        "plan": lambda: anyrank.plan(model, {"1.weight": torch.ones(4)}, missing="init"),
    }
    named = r"0\.0\.parametrizations\.weight\.original.*\. Build these modules on the CPU"
    with pytest.raises(anyrank.LoadError, match=named):
        calls[call]()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_a_parametrisation_computes_for_itself_is_refused_by_name() -> None:
    with anyrank.meta():
        model = net(parametrizations.spectral_norm)
    state = {
        k: t for k, t in net(parametrizations.spectral_norm).state_dict().items() if "_u" not in k
    }
    with pytest.raises(anyrank.LoadError, match=r"0\.0\.parametrizations\.weight\.0\._u"):
        anyrank.load(model, state)
    assert model[0][0].parametrizations.weight.original.is_meta


# -- the same tensor by the names of torch's other norms -----------------------------------------

OLD: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any], nn.Module]]] = {
    "weight_norm": (nn.utils.weight_norm, parametrizations.weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, parametrizations.spectral_norm),
}


class Net(nn.Module):
    """Two modules with a norm each."""

    def __init__(self, *norms: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4), nn.Conv1d(4, 3, 2)]
        self.layers = nn.Sequential(
            *(norms[n % len(norms)](layer) if norms else layer for n, layer in enumerate(layers))
        )


def old_and_new(kind: str) -> list[Net]:
    kinds = [*OLD] if kind == "both" else [kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.nn.utils.weight_norm is deprecated
        return [Net(*(OLD[k][n] for k in kinds)) for n in range(2)]


def save_dcp(state: Any, path: Path) -> None:
    anyrank.convert(state, path, to="dcp")


FORMATS: dict[str, Callable[[Any, Path], object]] = {
    "w.pt": torch.save,
    "w.safetensors": lambda state, path: save_file(state, path),
    "dcp": save_dcp,
    "table.pt": lambda state, path: torch.save({"model": state, "epoch": 1}, path),
}


def advised(error: BaseException) -> Any:
    """The rename= of the first way out that an error gives."""
    return ast.literal_eval(str(error).split("rename=")[1].splitlines()[0])


@pytest.mark.parametrize("prefix", ["", "module.", "generator."])
@pytest.mark.parametrize("turned", [False, True], ids=["old file", "new file"])
@pytest.mark.parametrize("kind", [*OLD, "both"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_names_of_the_other_form_come_first_among_the_ways_out(
    form: str, kind: str, turned: bool, prefix: str, tmp_path: Path
) -> None:
    source, model = reversed(old_and_new(kind)) if turned else old_and_new(kind)
    state = {f"{prefix}{k}": t.detach().clone() for k, t in source.state_dict().items()}
    FORMATS[form](state, tmp_path / form)
    with pytest.raises(anyrank.LoadError, match="of them match with rename=") as failed:
        anyrank.load(model, tmp_path / form)
    anyrank.load(model, tmp_path / form, rename=advised(failed.value))
    pairs = zip(model.eval().layers, source.eval().layers, strict=True)
    for (got, want), shape in zip(pairs, [(3, 4), (1, 4, 5)], strict=True):
        torch.testing.assert_close(got(torch.ones(shape)), want(torch.ones(shape)))


def pruned() -> Net:
    net = Net()
    for layer in net.layers:
        prune.random_unstructured(layer, "weight", 0.5)
    return net


@pytest.mark.parametrize("kind", ["old", "new", "pruned"])
def test_a_whole_tensor_and_one_in_parts_are_named(kind: str) -> None:
    plain, parts = (
        Net(),
        pruned() if kind == "pruned" else old_and_new("weight_norm")[kind == "new"],
    )
    with pytest.raises(anyrank.LoadError, match=r"the source has layers\.0\.weight in parts \("):
        anyrank.load(plain, parts.state_dict())
    with pytest.raises(anyrank.LoadError, match=r"the source has layers\.0\.weight as one tensor"):
        anyrank.load(parts, plain.state_dict())
    with pytest.raises(anyrank.LoadError, match="in parts"):
        anyrank.sync(plain, parts)


def test_names_that_only_look_like_parts_are_left_alone() -> None:
    model = nn.MultiheadAttention(4, 2, add_bias_kv=True)  # bias_k, bias_v
    state = {f"a.{key}": tensor for key, tensor in model.state_dict().items()}
    with pytest.raises(anyrank.LoadError, match=r"match with rename=\{'a': ''\}\n"):
        anyrank.load(model, state)
