"""What `load` and `materialize` leave of the objects of a meta model: identity, hooks, classes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import anyrank


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4, 2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x))[0])


@pytest.mark.parametrize("call", ["load", "materialize"])
def test_a_recurrent_module_on_meta_keeps_its_parameters(call: str) -> None:
    real = Recurrent()
    with anyrank.meta():
        model = Recurrent()
    before = list(model.parameters())
    if call == "load":
        report = anyrank.load(model, real.state_dict())
        x = torch.randn(3, 1, 4)
        assert torch.equal(model(x), real(x))
    else:
        report = anyrank.materialize(model)
    assert report.renewed == []
    assert all(a is b and not a.is_meta for a, b in zip(before, model.parameters(), strict=True))
    kept: Any = model.rnn._flat_weight_refs  # pyright: ignore[reportPrivateUsage]
    assert [ref() for ref in kept] == list(model.rnn.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_legacy_weight_norm_on_meta_keeps_its_parameters() -> None:
    def build() -> nn.Linear:
        return nn.utils.weight_norm(nn.Linear(3, 3))

    real = build()
    with anyrank.meta():
        model = build()
    before = model.weight_g
    assert anyrank.load(model, real.state_dict()).renewed == []
    assert model.weight_g is before
    x = torch.ones(2, 3)
    assert torch.equal(model(x), real(x))


def test_a_parameter_that_something_else_refers_to_is_replaced_and_named() -> None:
    with anyrank.meta():
        model = nn.Linear(2, 2)
    fired: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    old, reference = model.weight, weakref.ref(model.weight)
    report = anyrank.load(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert report.renewed == ["weight"]
    assert "\n  replaced     " in str(report)
    assert reference() is old
    assert model.weight is not old
    assert old.is_meta
    model(torch.ones(2)).sum().backward()
    assert fired == [1]


def test_a_load_that_fails_at_the_end_leaves_every_tensor_on_meta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with anyrank.meta():
        model = Recurrent()
    swap, calls = torch.utils.swap_tensors, list[int]()

    def fails_late(a: torch.Tensor, b: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise OSError("interrupted")
        swap(a, b)

    monkeypatch.setattr(torch.utils, "swap_tensors", fails_late)
    with pytest.raises(OSError, match="interrupted"):
        anyrank.load(model, Recurrent().state_dict())
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("on_meta", [False, True])
def test_hooks_of_parameters_fire_and_can_be_removed(on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Linear(2, 2)
    fired: list[str] = []
    handles: list[Any] = []
    for p in model.parameters():
        handles.append(p.register_post_accumulate_grad_hook(lambda _: fired.append("after")))
        handles.append(p.register_hook(lambda _: fired.append("before")))
    anyrank.load(model, nn.Linear(2, 2).state_dict())
    model(torch.ones(2)).sum().backward()
    assert sorted(fired) == ["after"] * 2 + ["before"] * 2
    for handle in handles:
        handle.remove()
    model(torch.ones(2)).sum().backward()
    assert len(fired) == 4


class Marked(nn.Parameter):
    """A class of the user's, with attributes and a constructor of its own."""

    def __new__(cls, data: torch.Tensor, mark: str) -> Marked:
        made = data.as_subclass(cls)
        made.mark = mark  # type: ignore[attr-defined]
        return made

    def __init__(self, data: torch.Tensor, mark: str) -> None: ...


def test_a_parameter_subclass_stays_its_class() -> None:
    with anyrank.meta():
        model = nn.Linear(2, 2, bias=False)
        model.weight = Marked(torch.empty(2, 2), "expert")
    anyrank.load(model, {"weight": torch.ones(2, 2)})
    weight: Any = model.weight
    assert type(weight) is Marked
    assert weight.mark == "expert"
    assert not weight.is_meta
    assert torch.equal(weight.detach().as_subclass(torch.Tensor), torch.ones(2, 2))


@pytest.mark.parametrize("call", ["load", "materialize"])
def test_parameters_filled_under_inference_mode_can_be_trained(call: str) -> None:
    with anyrank.meta():
        model = nn.Linear(2, 2)
    with torch.inference_mode():
        if call == "load":
            anyrank.load(model, nn.Linear(2, 2).state_dict())
        else:
            anyrank.materialize(model)
    assert not model.weight.is_inference()
    model(torch.ones(2)).sum().backward()
    assert model.weight.grad is not None
