"""What a function uses besides its arguments is the same when it runs again, or refused by name."""

from __future__ import annotations

import gc
import random
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anyrank

WIDTH = 4
D = torch.float64
GLOBAL = torch.ones(WIDTH, dtype=D)


class Scaled(nn.Module):
    """Reads a tensor that is not a buffer; autograd saves it, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
        self.scale = torch.ones(WIDTH, dtype=D)
        self.rows = {"first": self.scale}
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return use(self.linear(x), self.scale, self.how)


def use(x: torch.Tensor, scale: torch.Tensor, how: str) -> torch.Tensor:
    if how == "saved":
        return (x * scale).sin()
    if how == "saved view":
        return (x * scale[None]).sin()
    return (x + scale).sin()


Changed = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def a_variable(how: str) -> Changed:
    linear, scale = nn.Linear(WIDTH, WIDTH, dtype=D), torch.ones(WIDTH, dtype=D)
    return scale, lambda x: use(linear(x), scale, how)


def a_global(how: str) -> Changed:
    linear = nn.Linear(WIDTH, WIDTH, dtype=D)
    return GLOBAL, lambda x: use(linear(x), GLOBAL, how)


def an_attribute(how: str) -> Changed:
    layer = Scaled(how)
    return layer.scale, layer


def in_a_container(how: str) -> Changed:
    layer = Scaled(how)
    return layer.scale, lambda x: use(layer.linear(x), layer.rows["first"], how)


def in_an_object(how: str) -> Changed:
    linear, holder = nn.Linear(WIDTH, WIDTH, dtype=D), types.SimpleNamespace(scale=torch.ones(4))
    return holder.scale, lambda x: use(linear(x), holder.scale, how)


def of_a_module_with_children(how: str) -> Changed:
    layer = Scaled(how)
    return layer.scale, lambda x: use(layer.linear(x), layer.scale, how)


def a_default(how: str) -> Changed:
    linear, scale = nn.Linear(WIDTH, WIDTH, dtype=D), torch.ones(WIDTH, dtype=D)

    def fn(x: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
        return use(linear(x), scale, how)

    return scale, fn


PLACES = [
    a_variable,
    a_global,
    an_attribute,
    in_a_container,
    in_an_object,
    of_a_module_with_children,
    a_default,
]


def by_recompute(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return anyrank.recompute(fn, x)


def by_offload(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    offload = anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)
    return anyrank.recompute(fn, x * 1, offload=offload)


def nested(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return anyrank.recompute(lambda x: anyrank.recompute(fn, x).sin(), x)


def by_tile(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return anyrank.tile(fn, chunk_size=2, in_dims=0, out_dims=0)(x)


def by_loss(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    labels = torch.zeros(len(x), dtype=torch.long)
    return anyrank.tiled_loss(lambda x, _: fn(x).sum(-1), x, labels, chunk_size=2)


WAYS = [by_recompute, by_offload, nested, by_tile, by_loss]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(5, WIDTH, dtype=D, requires_grad=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["saved", "saved view", "not saved"])
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_tensor_changed_before_backward_is_refused(
    place: Callable[[str], Changed], how: str, way: Callable[..., torch.Tensor], x: torch.Tensor
) -> None:
    scale, fn = place(how)
    result = way(fn, x)
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(anyrank.RecomputeError, match=r"was changed in place between forward and"):
        result.sum().backward()


def test_the_error_names_what_was_changed(x: torch.Tensor) -> None:
    scale, fn = a_variable("not saved")
    result = anyrank.recompute(fn, x)
    scale.add_(1)
    with pytest.raises(anyrank.RecomputeError, match=r"variable scale, float64\[4\], .* a clone"):
        result.sum().backward()


def test_an_object_in_an_argument_is_watched(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, holder: Any) -> torch.Tensor:
        return (x + holder.scale).sin()

    holder = types.SimpleNamespace(scale=torch.ones(WIDTH, dtype=D))
    result = anyrank.recompute(fn, x, holder)
    holder.scale.add_(1)
    with pytest.raises(anyrank.RecomputeError, match="scale"):
        result.sum().backward()


def test_a_variable_that_each_turn_of_a_loop_assigns_anew_is_refused(x: torch.Tensor) -> None:
    results: list[torch.Tensor] = []
    for k in range(2):
        scale = torch.full((WIDTH,), k + 1.0, dtype=D)
        results.append(anyrank.recompute(lambda x: (x + scale).sin(), x))  # noqa: B023
    with pytest.raises(anyrank.RecomputeError, match=r"variable scale, .* was assigned anew"):
        sum(result.sum() for result in results).backward()  # pyright: ignore


def test_what_a_function_inside_names_is_watched(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return sum((x + row * GLOBAL).sin() for row in range(2))  # pyright: ignore

    result = anyrank.recompute(fn, x)
    GLOBAL.add_(1)
    with pytest.raises(anyrank.RecomputeError, match="variable GLOBAL"):
        result.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["itself", "captured", "its child"])
def test_script_modules_are_recomputed(how: str, x: torch.Tensor) -> None:
    norm = nn.BatchNorm1d(WIDTH, dtype=D)
    layer: Any = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=D), norm))
    ways = {"itself": layer, "captured": lambda x: layer(x) * 2, "its child": layer[0]}
    plain = torch.autograd.grad(ways[how](x).sin().sum(), x)
    result = anyrank.recompute(ways[how], x).sin().sum()
    assert torch.equal(torch.autograd.grad(result, x)[0], plain[0])


def test_a_parameter_named_beside_a_child_is_watched(x: torch.Tensor) -> None:
    layer = nn.Module()
    layer.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
    layer.shift = nn.Parameter(torch.ones(WIDTH, dtype=D))
    result = anyrank.recompute(lambda x: (layer.linear(x) + layer.shift).sin(), x)
    with torch.no_grad():
        layer.shift.add_(1)
    with pytest.raises(anyrank.RecomputeError, match="shift"):
        result.sum().backward()


def assert_right(fn: Callable[..., Any], x: torch.Tensor, change: Callable[[], Any]) -> None:
    """A change that the function does not read leaves gradients as they are."""
    plain = torch.autograd.grad(fn(x).sum(), x)
    result = anyrank.recompute(fn, x)
    with torch.no_grad():
        change()
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x), plain, rtol=0, atol=0)


def test_a_captured_tensor_that_is_not_read_may_change(x: torch.Tensor) -> None:
    like, seen = torch.zeros(5, WIDTH, dtype=D), torch.zeros(5, WIDTH, dtype=D)
    linear = nn.Linear(WIDTH, WIDTH, dtype=D)

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.copy_(x.detach())
        rows = like[: len(x)]  # a view
        return linear(x).sin().view(rows.shape)

    assert_right(fn, x, lambda: (like.add_(1), seen.add_(1)))


def test_a_workspace_that_each_call_fills_may_change(x: torch.Tensor) -> None:
    mask = torch.zeros(5, WIDTH, dtype=D)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * mask.copy_(x.detach() > 0)).sin()

    assert_right(fn, x, lambda: mask.fill_(7))


def test_a_result_may_be_changed_in_place(x: torch.Tensor) -> None:
    plain = torch.autograd.grad((x.exp() * 1).mul_(2).sum(), x)
    result = anyrank.recompute(torch.exp, x)  # autograd saves it
    torch.testing.assert_close(torch.autograd.grad(result.mul_(2).sum(), x), plain)


def test_a_cache_that_a_later_call_replaces_is_no_change(x: torch.Tensor) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(0, dtype=D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.table) < len(x):
                self.table = torch.arange(len(x), dtype=D).sin()
            return (x + self.table[: len(x), None]).sin()

    layer = Growing()
    assert_right(layer, x, lambda: layer(torch.ones(9, WIDTH, dtype=D)))


def test_a_captured_tensor_is_held_by_nobody_else(x: torch.Tensor) -> None:
    holder = types.SimpleNamespace(scale=torch.ones(WIDTH, dtype=D))
    alive = weakref.ref(holder.scale)
    result = anyrank.recompute(lambda x: (x + holder.scale).sin(), x)
    holder.scale = torch.ones(WIDTH, dtype=D)
    gc.disable()
    try:
        assert alive() is None
    finally:
        gc.enable()
    result.sum().backward()


def test_under_a_compiled_function_the_error_says_what_was_changed(x: torch.Tensor) -> None:
    shift = torch.ones(WIDTH, dtype=D)
    fn = torch.compile(lambda x: (x + shift).sin(), backend="aot_eager")
    result = anyrank.recompute(lambda x: fn(x).cos(), x)
    shift.add_(1)
    with pytest.raises(anyrank.RecomputeError) as raised:
        result.sum().backward()
    assert "shift" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


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


class Noisy(nn.Module):
    """Draws from a generator that it has as an attribute."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.generators = [generator]
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * float(self.draw(self.generators[0]))).sin()


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_rng": (lambda: np.random.default_rng(3), lambda g: g.random()),
    "RandomState": (lambda: np.random.RandomState(3), lambda g: g.rand()),
    "Random": (lambda: random.Random(3), lambda g: g.random()),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g)),
}
Use = Callable[[Any, Callable[[Any], Any]], tuple[Callable[..., Any], tuple[Any, ...]]]
USES: dict[str, Use] = {
    "an argument": lambda g, draw: (lambda x, g: (x * float(draw(g))).sin(), (g,)),
    "a variable": lambda g, draw: (lambda x: (x * float(draw(g))).sin(), ()),
    "an attribute": lambda g, draw: (Noisy(g, draw), ()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("tiled", [False, True])
def test_a_generator_draws_the_same_again_and_goes_on(
    kind: str, use: str, tiled: bool, x: torch.Tensor
) -> None:
    make, draw = GENERATORS[kind]
    drawn: list[Any] = []
    for run in (lambda fn, *args: fn(*args), anyrank.recompute):
        generator = make()
        fn, rest = USES[use](generator, draw)
        if tiled:
            fn = anyrank.tile(fn, chunk_size=4, in_dims=0, out_dims=0)
        result = run(fn, x, *rest)
        torch.testing.assert_close(*derivative(result, x))
        drawn.append(draw(generator))
    assert drawn[0] == drawn[1]


def derivative(result: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of sin(c x) for x by backward, and from the result itself."""
    factor = result.detach().asin() / x.detach()
    (mine,) = torch.autograd.grad(result.sum(), x)
    return mine, factor * (factor * x.detach()).cos()


def test_generators_that_are_none_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="generators has a int"):
        anyrank.recompute(torch.sin, x, generators=[3])
    with pytest.raises(TypeError, match="generators has a int"):
        anyrank.recompute_(nn.Sequential(nn.Tanh()), "*", generators=[3])
