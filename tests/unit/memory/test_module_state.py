"""Weights and buffers that a recomputed function reads twice are the same, or refused."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anyrank

WIDTH = 4
D = torch.float64


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(5, WIDTH, dtype=D, requires_grad=True)


def by_tile(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return anyrank.tile(fn, chunk_size=2, in_dims=0, out_dims=0)(x)


def by_loss(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    labels = torch.zeros(len(x), dtype=torch.long)
    return anyrank.tiled_loss(lambda x, _: fn(x).sum(-1), x, labels, chunk_size=2)


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
def test_other_weights_under_functional_call_are_refused(kind: str) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).double()
    x = torch.randn(1, 6, WIDTH, dtype=D)
    if kind == "recompute_":
        anyrank.recompute_(net, "0")
    else:
        anyrank.tile_(net, "0", chunk_size=2, grad_dtype=D if kind == "wide tile_" else None)
    fast: dict[str, Any] = {n: p - 0.5 * p.sin() for n, p in net.named_parameters()}
    loss = torch.func.functional_call(net, fast, (x,)).sum()
    with pytest.raises(
        anyrank.RecomputeError, match=r"weight, .* is not the tensor of the forward pass"
    ):
        loss.backward()


class Codebook(nn.Module):
    """Quantizes to a codebook that it moves in the forward pass, in place or by assignment."""

    def __init__(self, assigns: bool, rows: int = 3) -> None:
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


@pytest.mark.parametrize("assigns", [False, True])
def test_buffers_that_the_function_moves_itself_move_once(assigns: bool) -> None:
    outcomes: list[list[torch.Tensor]] = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = Codebook(assigns)
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


def test_a_large_buffer_that_the_function_moves_is_refused_at_once() -> None:
    module = Codebook(assigns=False, rows=4000)
    with pytest.raises(anyrank.RecomputeError, match=r"tensor codes, .* by the function itself"):
        anyrank.recompute(module, torch.randn(8, WIDTH, dtype=D))


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
    result = pair.run(torch.ones(3, 2))
    with torch.no_grad():
        pair.one.weight.add_(1)
    with pytest.raises(anyrank.RecomputeError, match=r"one\.weight, .* was changed in place"):
        result.sum().backward()


def test_an_optimizer_may_step_in_backward() -> None:
    """A method of the whole model is recomputed after weights of its later part were stepped."""
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def first(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = anyrank.recompute(self.first, x)
            return anyrank.recompute(lambda x: self.two(x).sin(), x)

    pair = Pair()
    before = [p.clone() for p in pair.parameters()]

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    for parameter in pair.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    pair(torch.ones(3, 2)).sum().backward()
    assert not any(map(torch.equal, before, pair.parameters()))


class Grown(nn.Module):
    """Replaces a buffer by a longer one where it is too short, as a rotary table does."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("table", torch.arange(1.0, len(x) + 1), persistent=False)
        table: Any = self.table
        return ((x @ self.weight).T * table[: len(x)]).T.sin()


def test_a_table_that_grows_is_the_same_in_both_runs() -> None:
    torch.manual_seed(0)
    plain = Grown()
    again = copy.deepcopy(plain)
    sizes = torch.randn(4, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    for call in (plain, lambda x: anyrank.recompute(again, x)):
        sum(call(each).sum() for each in sizes).backward()
    assert torch.equal(plain.weight.grad, again.weight.grad)
    assert torch.equal(plain.table, again.table)


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


@pytest.mark.parametrize("what", ["module", "function"])
def test_another_module_in_a_loops_variable_is_refused(what: str) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(3, 4, requires_grad=True)
    for layer in layers:
        if what == "module":
            x = anyrank.recompute(lambda h: layer(h).sin(), x)  # noqa: B023
        else:

            def block(h: torch.Tensor) -> torch.Tensor:
                return h + layer(h).sin()  # noqa: B023

            x = anyrank.recompute(block, x)
    with pytest.raises(
        anyrank.RecomputeError, match="variable layer was assigned a different module"
    ):
        x.sum().backward()


def test_what_has_no_shape_yet_is_recomputed() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    x = torch.randn(3, 4, requires_grad=True)
    anyrank.recompute(lazy, x).square().sum().backward()
    assert lazy[0].weight.grad is not None


def test_a_module_that_changes_its_own_parameter_is_named() -> None:
    embedding = nn.Embedding(5, 3, max_norm=0.5)
    with pytest.raises(
        anyrank.RecomputeError, match=r"weight, .* by the function itself \(such as by nn"
    ):
        anyrank.recompute(embedding, torch.tensor([1, 1, 2]))


# -- arguments and generators ---------------------------------------------------------------------


ARGUMENTS: dict[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "args[0]": lambda h: ((h,), {}),
    "args[0]['h']": lambda h: (({"h": h},), {}),
    "kwargs['h']": lambda h: ((), {"h": h}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_argument_changed_before_backward_is_refused_by_name(
    name: str, outer: bool, requires_grad: bool, x: torch.Tensor
) -> None:
    linear = nn.Linear(WIDTH, WIDTH, dtype=D)
    h = (x if requires_grad else x.detach()) * 2
    args, kwargs = ARGUMENTS[name](h)

    def fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: Any = [*args, *kwargs.values()][0]
        return linear(value["h"] if isinstance(value, dict) else value).sin()

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        return anyrank.recompute(fn, *args, **kwargs).cos()

    result = anyrank.recompute(run, *args, **kwargs) if outer else run(*args, **kwargs)
    h.detach().add_(1)
    with pytest.raises(anyrank.RecomputeError, match=f"{re.escape(name)}, .* was changed in place"):
        result.sum().backward()


@pytest.mark.parametrize("way", [by_tile, by_loss])
def test_an_argument_of_tiles_changed_before_backward_is_refused(
    way: Callable[..., torch.Tensor], x: torch.Tensor
) -> None:
    h = x * 2
    result = way(nn.Linear(WIDTH, WIDTH, dtype=D), h)
    h.detach().add_(1)
    with pytest.raises(anyrank.RecomputeError, match=r"args\[0\], .* was changed in place"):
        result.sum().backward()


def _seeded(module: Any) -> Any:
    """Python's generator, or numpy's, which is a module's."""
    module.seed(3)
    return module


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_rng": (lambda: np.random.default_rng(3), lambda g: g.random()),
    "RandomState": (lambda: np.random.RandomState(3), lambda g: g.rand()),
    "Random": (lambda: random.Random(3), lambda g: g.random()),
    "random": (lambda: _seeded(random), lambda module: module.random()),
    "numpy.random": (lambda: _seeded(np.random), lambda module: module.rand()),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g)),
}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (kind, given)
        for kind in GENERATORS
        for given in ("named", "an argument", "an argument of a tile")
        if given == "named" or kind not in ("random", "numpy.random")
    ],
)
def test_a_generator_draws_the_same_again_and_goes_on(
    kind: str, given: str, x: torch.Tensor
) -> None:
    make, draw = GENERATORS[kind]
    drawn: list[Any] = []

    def noisy(x: torch.Tensor, generator: Any) -> torch.Tensor:
        return (x * float(draw(generator))).sin()

    for plain in (True, False):
        generator = make()
        call: Any = noisy
        if given == "an argument of a tile":
            call = anyrank.tile(noisy, chunk_size=4, in_dims=0, out_dims=0)
        elif not plain:
            named = [generator] if given == "named" else []
            call = functools.partial(anyrank.recompute, noisy, generators=named)
            if given == "named":
                call = lambda x, g, run=noisy: anyrank.recompute(  # noqa: E731
                    lambda x: run(x, g), x, generators=[g]
                )
        result = call(x, generator)
        torch.testing.assert_close(*_derivative(result, x))
        drawn.append(draw(generator))
    assert drawn[0] == drawn[1]


def _derivative(result: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of sin(c x) for x by backward, and from the result itself."""
    factor = result.detach().asin() / x.detach()
    (mine,) = torch.autograd.grad(result.sum(), x)
    return mine, factor * (factor * x.detach()).cos()
