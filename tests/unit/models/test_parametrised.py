"""Parametrised modules on meta: filled from a source that holds them, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

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
    named = r"0\.0\.parametrizations\.weight\.original.*: build these modules on the CPU"
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
