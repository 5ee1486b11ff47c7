"""Weights and buffers that a recomputed function reads twice are the same, or refused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anyrank

WIDTH = 4
D = torch.float64


class Layer(nn.Module):
    """Has tensors that autograd does not save: a table, positions, a bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, dtype=D)
        self.positions = nn.Parameter(torch.randn(WIDTH, dtype=D))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=D))
        self.register_buffer("large", torch.ones(200, 200, dtype=D))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.positions
        return torch.tanh(self.linear(x)).sin() * self.mask * self.large[0, 0]


WAYS: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    "the module": lambda m, t: anyrank.recompute(m, t),
    "its forward": lambda m, t: anyrank.recompute(m.forward, t),
    "a function of it": lambda m, t: anyrank.recompute(lambda t: m(t) * 1, t),
    "an argument": lambda m, t: anyrank.recompute(lambda f, t: f(t), m, t),
    "a partial": lambda m, t: anyrank.recompute(functools.partial(type(m).forward, m), t),
    "a tile": lambda m, t: anyrank.tile(m, chunk_size=2, in_dims=0, out_dims=0)(t),
    "a tile of a function": lambda m, t: anyrank.tile(
        lambda t: m(t), chunk_size=2, in_dims=0, out_dims=0
    )(t),
}
TOKENS = torch.arange(5)


def grads(layer: Layer, result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.sum(), list(layer.parameters())))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["table.weight", "positions", "linear.bias", "linear.weight", "large"]
)
def test_a_weight_changed_between_forward_and_backward_is_refused_by_name(
    way: str, name: str
) -> None:
    layer = Layer()
    result = WAYS[way](layer, TOKENS)
    with torch.no_grad():
        (dict(layer.named_parameters()) | dict(layer.named_buffers()))[name].add_(1)
    with pytest.raises(anyrank.RecomputeError, match=rf"{name}.* was changed in place"):
        result.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_small_buffer_has_its_first_value_again(way: str) -> None:
    layer = Layer()
    plain = grads(layer, layer(TOKENS))
    result = WAYS[way](layer, TOKENS)
    layer.mask.mul_(3)
    for mine, wanted in zip(grads(layer, result), plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.mask, torch.full((WIDTH,), 3.0, dtype=D))


@pytest.mark.parametrize("kind", ["recompute_", "tile_", "wide tile_"])
@pytest.mark.parametrize("weights", ["tensors", "parameters"])
def test_functional_call_recomputes_with_the_weights_it_was_given(kind: str, weights: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    net = Net().double()
    x = torch.randn(1, 6, WIDTH, dtype=D)

    def meta_grads() -> list[torch.Tensor]:
        fast: dict[str, Any] = {n: p - 0.5 * p.sin() for n, p in net.named_parameters()}
        if weights == "parameters":
            fast = {n: nn.Parameter(p.detach()) for n, p in fast.items()}
        loss = torch.func.functional_call(net, fast, (x,)).pow(2).sum()
        wanted = fast.values() if weights == "parameters" else net.parameters()
        return list(torch.autograd.grad(loss, list(wanted)))

    plain = meta_grads()
    if kind == "recompute_":
        anyrank.recompute_(net, "block")
    else:
        anyrank.tile_(net, "block", chunk_size=2, grad_dtype=D if kind == "wide tile_" else None)
    for mine, wanted in zip(meta_grads(), plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


class Codebook(nn.Module):
    """Quantises to a codebook that it moves in the forward pass, in place or by assignment."""

    def __init__(self, rows: int, assigns: bool) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(rows, WIDTH, dtype=D))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=D)
        self.assigns = assigns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(self.linear(x))
        with torch.no_grad():
            moved = self.codes + 0.5 * z.abs().mean(0)
            if self.assigns:
                self.codes = moved
            else:
                self.codes.copy_(moved)
        return (z * self.codes[0].clone()).sin()


@pytest.mark.parametrize("rows", [3, 4000])
@pytest.mark.parametrize("assigns", [False, True])
def test_buffers_that_the_function_moves_itself_move_once(rows: int, assigns: bool) -> None:
    outcomes: list[list[torch.Tensor]] = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = Codebook(rows, assigns)
        x = torch.randn(8, WIDTH, dtype=D)
        results = [anyrank.recompute(module, x) if ours else module(x) for _ in range(2)]
        found = [
            each.clone()
            for result in reversed(results)
            for _ in range(2)
            for each in torch.autograd.grad(
                result.sum(), list(module.parameters()), retain_graph=True
            )
        ]
        outcomes.append([*found, *(buffer.clone() for buffer in module.buffers())])
    for mine, wanted in zip(*outcomes, strict=True):
        assert torch.equal(mine, wanted)


def test_a_second_call_of_another_part_may_step_its_own_weights() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return anyrank.recompute(lambda x: self.one(x).sin(), x)

    pair = Pair()
    result = pair.run(torch.ones(3, 2))
    with torch.no_grad():
        pair.two.weight.add_(1)
    result.sum().backward()
    assert pair.one.weight.grad is not None


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_and_numpy_are_drawn_again(draw: Callable[[], float]) -> None:
    x = torch.ones(3, dtype=D, requires_grad=True)
    drawn: list[float] = []

    def stochastic_depth(x: torch.Tensor) -> torch.Tensor:
        drawn.append(draw())
        return (x * drawn[-1]).sin()

    result = anyrank.recompute(stochastic_depth, x)
    after = draw()
    draw()
    result.sum().backward()
    assert drawn[0] == drawn[1]
    assert drawn[0] != after
    assert torch.equal(x.grad, drawn[0] * (x * drawn[0]).cos())


class Once(nn.Module):
    """Fills a buffer in its first run, and says so in a plain attribute, as a rotary table does."""

    def __init__(self, by_length: bool) -> None:
        super().__init__()
        self.by_length, self.length = by_length, 0
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.zeros(0 if by_length else 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: Any = self.table
        if self.by_length and len(x) > self.length:
            self.length, self.is_set = len(x), True
            self.register_buffer("table", torch.arange(1.0, len(x) + 1), persistent=False)
        elif not self.by_length and not hasattr(self, "is_set"):
            self.is_set = True
            table.copy_(x.detach().mean(0))
        scale: Any = self.table
        return (
            ((x @ self.weight).T * scale[: len(x)]).T.sin()
            if self.by_length
            else (x @ self.weight * scale).sin()
        )


@pytest.mark.parametrize("by_length", [False, True])
def test_a_buffer_that_is_filled_once_is_filled_in_both_runs(by_length: bool) -> None:
    torch.manual_seed(0)
    plain = Once(by_length)
    again = copy.deepcopy(plain)
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    sizes = (x, y) if by_length else (x,)
    for net, call in ((plain, plain), (again, lambda x: anyrank.recompute(again, x))):
        sum(call(each).sum() for each in sizes).backward()
        assert net.is_set
    assert torch.equal(plain.weight.grad, again.weight.grad)
    assert torch.equal(plain.table, again.table)
    assert plain.length == again.length


def test_a_counter_beside_unchanged_buffers_counts_both_runs() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (x * self.table).sin()

    net = Counting()
    anyrank.recompute(net, torch.randn(4, requires_grad=True)).sum().backward()
    assert net.calls == 2


def helper(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.norm(net.inner(x))


class Holder:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.net, x)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.net.inner(x))


def whole_uses() -> dict[str, Callable[[Any], Callable[[Any], Any]]]:
    return {
        "helper": lambda net: lambda x: helper(net, net.inner(x)),
        "method": lambda net: Holder(net).both,
        "lambda": lambda net: (lambda holder: lambda x: holder.both(x))(Holder(net)),
    }


@pytest.mark.parametrize("how", whole_uses())
def test_a_module_that_is_handed_on_is_watched_whole(how: str) -> None:
    """Its batch norm counts once, though the function names another child of it."""
    torch.manual_seed(0)
    net = nn.Module()
    net.inner, net.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    x = torch.randn(3, 4, requires_grad=True)
    anyrank.recompute(whole_uses()[how](net), x).sum().backward()
    assert int(net.norm.num_batches_tracked) == 1


@pytest.mark.parametrize("what", ["module", "function", "index"])
def test_another_module_in_a_loops_variable_is_refused(what: str) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(3, 4, requires_grad=True)
    for n, layer in enumerate(layers):
        if what == "module":
            x = anyrank.recompute(lambda h: layer(h).sin(), x)  # noqa: B023
        elif what == "index":
            x = anyrank.recompute(lambda h: layers[n](h).sin(), x)  # noqa: B023
        else:

            def block(h: torch.Tensor) -> torch.Tensor:
                return h + layer(h).sin()  # noqa: B023

            x = anyrank.recompute(block, x)
    text = "variable layer was assigned another module|has used other parameters"
    with pytest.raises(anyrank.RecomputeError, match=text):
        x.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_has_no_shape_or_no_dicts_yet_is_recomputed() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    x = torch.randn(3, 4, requires_grad=True)
    anyrank.recompute(lazy, x).square().sum().backward()
    assert lazy[0].weight.grad is not None
    traced = torch.jit.trace(nn.Linear(4, 4), torch.randn(3, 4))
    anyrank.recompute(traced, x).sum().backward()
    assert next(traced.parameters()).grad is not None


def test_a_module_that_changes_its_own_parameter_is_named() -> None:
    embedding = nn.Embedding(5, 3, max_norm=0.5)
    result = anyrank.recompute(embedding, torch.tensor([1, 1, 2])).sum()
    with pytest.raises(anyrank.RecomputeError, match=r"weight, .* by the function itself, as nn"):
        result.backward()
