"""The table of optimizers that exact=True trusts, proved by cutting tensors as FSDP2 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from anyrank.training.exact.optimizers import DEPENDING, PROVED, judge

CUTS = (2, 3, 5)  # pieces
SHAPES = [(133,), (7, 13), (1031,)]
NUM_STEPS = 6
DECAYED: dict[str, Any] = {"weight_decay": 0.1}
# Options that choose other operations.
OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.Adadelta: [DECAYED],
    optim.Adagrad: [DECAYED | {"lr_decay": 0.1}],
    optim.Adam: [DECAYED | {"amsgrad": True}, {"maximize": True}],
    optim.AdamW: [{}, {"amsgrad": True}],
    optim.Adamax: [DECAYED],
    optim.ASGD: [DECAYED],
    optim.NAdam: [DECAYED, DECAYED | {"decoupled_weight_decay": True}],
    optim.RAdam: [DECAYED, DECAYED | {"decoupled_weight_decay": True}],
    optim.RMSprop: [DECAYED | {"momentum": 0.9, "centered": True}],
    optim.Rprop: [{}],
    optim.SGD: [DECAYED | {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
}
ALL: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    kind: [{}, *more] for kind, more in OPTIONS.items()
}


def train(
    kind: Any, options: dict[str, Any], terms: list[torch.Tensor], number: int
) -> list[torch.Tensor]:
    """A parameter, and its state, after some steps in pieces."""
    pieces = [term.chunk(number) for term in terms]
    parameters = [nn.Parameter(piece.clone()) for piece in pieces[0]]
    optimizer = kind(parameters, lr=1e-2, **options)
    for gradients in pieces[1:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    rows: list[list[torch.Tensor]] = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        like = [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
        rows.append([parameter.detach(), *(t for t in like if t.shape == parameter.shape)])
    return [torch.cat(row) for row in zip(*rows, strict=True)]


def is_same_when_cut(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> bool:
    """Whether the pieces of a tensor get the bits of the whole tensor, of any shape."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    for shape in SHAPES:
        terms = [
            torch.randn(shape, generator=generator, dtype=drawn).to(dtype)
            for _ in range(1 + NUM_STEPS)
        ]
        one = train(kind, options, terms, 1)
        for number in CUTS:
            if not all(map(torch.equal, one, train(kind, options, terms, number))):
                return False
    return True


def proved_cases() -> list[Any]:
    cases: list[Any] = []
    for kind, row in PROVED.items():
        dtypes = [torch.float32, torch.float64]
        dtypes += [torch.bfloat16, torch.float16] if row.low else []
        dtypes += [torch.complex64] if row.is_complex else []
        modes: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}]
        for dtype in dtypes:
            is_fused = row.fused and dtype in (torch.float32, torch.float64)
            for mode in [*modes, {"fused": True}] if is_fused else modes:
                name = f"{kind.__name__} {dtype} {mode}"
                cases.append(pytest.param(kind, mode, dtype, id=name))
    return cases


@pytest.mark.parametrize(("kind", "mode", "dtype"), proved_cases())
def test_what_the_table_says_is_proved(
    kind: type[optim.Optimizer], mode: dict[str, Any], dtype: torch.dtype
) -> None:
    for options in ALL[kind]:
        assert judge(kind, mode | options, dtype, "cpu") is None
        assert is_same_when_cut(kind, mode | options, dtype), options


def test_each_row_is_proved_and_each_class_of_torch_is_judged() -> None:
    assert ALL.keys() == PROVED.keys()
    known = {*PROVED, *DEPENDING}
    classes = [kind for kind in vars(optim).values() if isinstance(kind, type)]
    others = {kind.__name__ for kind in classes if issubclass(kind, optim.Optimizer)}
    others -= {kind.__name__ for kind in known}
    assert others == {"Optimizer", "SparseAdam", "Muon"}, "decide, and prove"


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "words"),
    [
        (optim.AdamW, {"fused": True}, torch.float32, "AdamW(fused=True) steps sharded"),
        (optim.AdamW, {"fused": True}, torch.bfloat16, "Build it with foreach=True"),
        (optim.SGD, {"fused": True}, torch.float64, "its kernel rounds the elements"),
        (
            optim.SGD,
            {},
            torch.bfloat16,
            "SGD's result for torch.bfloat16 depends on where a shard ends",
        ),
        (optim.RAdam, {}, torch.float16, "MixedPrecisionPolicy(param_dtype=torch.float16, reduce"),
        (optim.AdamW, {}, torch.complex64, "call torch.view_as_complex in the forward"),
        (optim.LBFGS, {}, torch.float32, "LBFGS steps sharded parameters, but its dot products"),
        (optim.Adafactor, {}, torch.float32, "its means run over rows"),
    ],
)
def test_what_is_known_to_depend_on_shards_is_refused(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(ValueError, match="exact=True") as caught:
        judge(kind, options, dtype, "cpu")
    assert words in str(caught.value)


class Derived(optim.SGD):
    """May step in any way."""


@pytest.mark.parametrize(
    ("kind", "options", "device"),
    [(Derived, {}, "cpu"), (optim.Muon, {}, "cpu"), (optim.AdamW, {"fused": True}, "cuda")],
)
def test_what_is_not_proved_is_noted(
    kind: type[optim.Optimizer], options: dict[str, Any], device: str
) -> None:
    note = judge(kind, options, torch.float32, device)
    assert note is not None
    assert f"{kind.__name__}" in note
    assert "is not verified to give the same bits" in note


def test_a_cut_shows_an_optimizer_that_looks_beyond_an_element() -> None:
    assert not is_same_when_cut(optim.Adafactor, {}, torch.float32)
