"""`recompute` and `recompute_` in one process, compared with the plain call bit by bit."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import anyrank
from anyrank.memory.patch import matcher

WIDTH = 6


class Mlp(nn.Module):
    """Counts its calls, and takes what a layer may take."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self.calls += 1
        for tensor in [*rest, *named.values()]:
            x = x * tensor
        x = F.dropout(torch.tanh(self.up(x)), self.dropout)
        return self.down(x).sin()


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(
    fn: Callable[..., Any], module: nn.Module, inputs: list[torch.Tensor], seed: int = 3
) -> list[torch.Tensor]:
    """The result and all gradients of one pass."""
    torch.manual_seed(seed)
    result = fn()
    wanted = [*module.parameters(), *inputs]
    grads = torch.autograd.grad(result.sum(), wanted, allow_unused=True)
    return [result.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@dataclass
class Bag:
    """A container that pytree does not know."""

    tensor: torch.Tensor


Pair = collections.namedtuple("Pair", "a b")  # as third-party code has them

# How tensors reach the function: args and kwargs from two tensors.
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "positional": lambda x, y: ((x, y), {}),
    "keyword": lambda x, y: ((), {"x": x, "y": y}),
    "list": lambda x, y: (([x, [y]],), {}),
    "dict in keyword": lambda x, y: ((), {"inputs": {"x": x, "more": (y, None, 3)}}),
    "namedtuple": lambda x, y: ((Pair(x, y),), {}),
    "same tensor twice": lambda x, y: ((x, y, x), {}),
    "unknown container": lambda x, y: ((x, Bag(y)), {}),
}


def flat_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Bag):
        return [value.tensor]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in flat_tensors(each)]
    return []


@pytest.mark.parametrize("way", WAYS)
def test_tensors_at_any_depth_get_their_gradients(way: str) -> None:
    module = Mlp().double()
    x, y = leaves((4, WIDTH), (4, WIDTH))
    args, kwargs = WAYS[way](x, y)

    def fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        return module(*flat_tensors([args, kwargs]))

    plain = gradients(lambda: fn(*args, **kwargs), module, [x, y])
    assert_equal(gradients(lambda: anyrank.recompute(fn, *args, **kwargs), module, [x, y]), plain)
    assert module.calls == 3


@pytest.mark.parametrize("way", [way for way in WAYS if way != "unknown container"])
def test_what_a_region_saves_is_its_tensors_each_once(way: str) -> None:
    x, y = leaves((4, WIDTH), (4, WIDTH))
    args, kwargs = WAYS[way](x, y)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module = Mlp().double()
        anyrank.recompute(lambda *a, **k: module(*flat_tensors([a, k])), *args, **kwargs)
    assert sorted(map(id, packed)) == sorted([id(x), id(y)])


def test_a_tensor_given_twice_is_one_object_again() -> None:
    x, weight = leaves((3, WIDTH), (WIDTH, WIDTH))
    same: list[bool] = []

    def fn(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same.append(query is key)
        return (query @ weight).tanh() * key

    anyrank.recompute(fn, x, x).sum().backward()
    assert same == [True, True]


def test_the_arguments_of_a_partial_are_packed() -> None:
    module = Mlp().double()
    x, y = leaves((4, WIDTH), (4, WIDTH))
    call = functools.partial(functools.partial(module, scale=y), x)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda none: none):
        anyrank.recompute(call)
    assert [id(tensor) for tensor in packed] == [id(x), id(y)]
    plain = gradients(lambda: module(x, scale=y), module, [x, y])
    assert_equal(gradients(lambda: anyrank.recompute(call), module, [x, y]), plain)


def test_containers_that_the_function_fills_are_the_callers_and_filled_once() -> None:
    (x,) = leaves((4, WIDTH))
    collected: list[torch.Tensor] = []

    def fn(x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        into.append(x.sin())
        return torch.cat(into).cos()

    anyrank.recompute(fn, x, collected).sum().backward()
    assert len(collected) == 1
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


# -- what else a second run needs -----------------------------------------------------------------


def test_dropout_draws_the_same_numbers_again_and_leaves_the_stream_alone() -> None:
    module = Mlp(dropout=0.5).double()
    (x,) = leaves((8, WIDTH))
    plain = gradients(lambda: module(module(x)), module, [x])
    after = torch.rand(())
    ours = gradients(lambda: anyrank.recompute(module, anyrank.recompute(module, x)), module, [x])
    assert_equal(ours, plain)
    assert torch.equal(torch.rand(()), after)


def test_the_default_device_is_in_force_again() -> None:
    (x,) = leaves((4, WIDTH))
    seen: list[str] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    with torch.device("meta"):
        result = anyrank.recompute(fn, x)
    result.sum().backward()
    assert seen == ["meta", "meta"]


# -- autograd in all its forms --------------------------------------------------------------------


def test_a_backward_pass_inside_the_function() -> None:
    module = Mlp().double()
    (x,) = leaves((4, WIDTH))

    def force(x: torch.Tensor) -> torch.Tensor:
        energy = module(x).pow(2).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    plain = gradients(lambda: force(x), module, [x])
    assert_equal(gradients(lambda: anyrank.recompute(force, x), module, [x]), plain)


def test_regions_in_regions_run_as_often_as_they_must() -> None:
    a, b, c = (Mlp().double() for _ in range(3))
    both = nn.ModuleList([a, b, c])
    (x,) = leaves((4, WIDTH))

    def inner(x: torch.Tensor) -> torch.Tensor:
        return anyrank.recompute(b, anyrank.recompute(a, x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return anyrank.recompute(c, anyrank.recompute(inner, x))

    plain = gradients(lambda: c(b(a(x))), both, [x])
    for module in both:
        module.calls = 0
    assert_equal(gradients(lambda: anyrank.recompute(outer, x), both, [x]), plain)
    # The last of a region is never run to find its inputs: they are packed before it.
    assert (a.calls, b.calls, c.calls) == (4, 3, 2)


def test_inside_torchs_own_region_and_around_it() -> None:
    module = Mlp().double()
    (x,) = leaves((4, WIDTH))
    torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    plain = gradients(lambda: module(module(x)), module, [x])
    within = lambda x: anyrank.recompute(module, anyrank.recompute(module, x))  # noqa: E731
    assert_equal(gradients(lambda: torchs(within, x), module, [x]), plain)
    around = lambda x: torchs(module, torchs(module, x))  # noqa: E731
    assert_equal(gradients(lambda: anyrank.recompute(around, x), module, [x]), plain)


def test_a_selective_policy_keeps_what_it_names() -> None:
    module = Mlp().double()
    (x,) = leaves((4, WIDTH))
    products: list[bool] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            products.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    plain = gradients(lambda: module(x), module, [x])
    ours = gradients(lambda: anyrank.recompute(module, x, context_fn=contexts), module, [x])
    assert_equal(ours, plain)
    assert products


# -- memory ---------------------------------------------------------------------------------------


def test_nothing_of_the_block_lives_between_forward_and_backward_nor_after() -> None:
    (x,) = leaves((4, WIDTH))
    inside: list[weakref.ref[torch.Tensor]] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        hidden = x.exp()
        inside.append(weakref.ref(hidden.untyped_storage()))
        return hidden.sin().cos()

    given = x * 2
    storage = weakref.ref(given)
    gc.disable()  # nothing may need it
    try:
        result = anyrank.recompute(fn, given).sum()
        del given
        assert storage() is not None
        result.backward()
        assert storage() is None  # though `result` lives
        assert [ref() for ref in inside] == [None, None]
    finally:
        gc.enable()


def test_what_backward_cannot_ask_for_is_not_kept() -> None:
    unused: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        aside = x.exp()
        unused.append(weakref.ref(aside.untyped_storage()))
        aside.sin()  # saves `aside`, and is thrown away
        hidden = x.sin()
        hidden.register_hook(lambda grad: alive.extend(ref() is not None for ref in unused))
        return hidden.exp()

    (x,) = leaves((4, WIDTH))
    anyrank.recompute(fn, x).sum().backward()
    assert alive == [False, False]  # of the first run and of the second, between exp and sin


# -- bad input ------------------------------------------------------------------------------------


def test_a_function_that_changes_its_argument_is_refused() -> None:
    (x,) = leaves((4, WIDTH))
    with pytest.raises(
        anyrank.RecomputeError, match=r"modifies its argument kwargs\['x'\]\[1\] in place"
    ):
        anyrank.recompute(lambda x: x[1].mul_(2).sin(), x=[None, x * 1])


@pytest.mark.parametrize("change", ["fewer", "more", "shape", "dtype"])
def test_a_function_that_does_something_else_again_is_refused(change: str) -> None:
    (x,) = leaves((4, WIDTH))
    calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        again = calls > 1
        if change in ("fewer", "more"):
            return x.sin() if again == (change == "fewer") else x.sin().cos().exp()
        if again:
            x = x[:2] if change == "shape" else x.float()
        return x.sin().sum()

    result = anyrank.recompute(fn, x).sum()
    if change == "more":  # what it saves first is what was wanted
        result.backward()
        assert torch.equal(x.grad, x.cos())
        return
    text = "different number of tensors|different metadata"
    with pytest.raises(CheckpointError, match=text):
        result.backward()


def test_an_error_inside_leaves_nothing_behind() -> None:
    module = Mlp().double()
    (x,) = leaves((4, WIDTH))

    def broken(x: torch.Tensor) -> torch.Tensor:
        module(x)
        raise KeyError("inside")

    plain = gradients(lambda: module(x), module, [x])
    with pytest.raises(KeyError, match="inside"):
        anyrank.recompute(broken, x)
    assert_equal(gradients(lambda: anyrank.recompute(module, x), module, [x]), plain)


# -- recompute_ -----------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers as models have them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_patched_layers_are_recomputed_until_the_handle_undoes_it() -> None:
    model = Model().double()
    (x,) = leaves((4, WIDTH))
    names = list(model.state_dict())
    plain = gradients(lambda: model(x), model, [x])
    handle = anyrank.recompute_(model, "layers.*")
    assert handle.names == ["layers.0", "layers.1", "layers.2"]
    assert list(model.state_dict()) == names
    for layer in model.layers:
        layer.calls = 0
    assert_equal(gradients(lambda: model(x), model, [x]), plain)
    assert [layer.calls for layer in model.layers] == [2, 2, 2]
    handle.remove()
    handle.remove()
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    gradients(lambda: model(x), model, [x])
    assert [layer.calls for layer in model.layers] == [3, 3, 3]


def test_a_deep_copy_uses_its_own_weights() -> None:
    model = Model().double()
    anyrank.recompute_(model, "layers.*")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    (x,) = leaves((4, WIDTH))
    twin(x).sum().backward()
    assert twin.layers[2].down.bias.grad is not None
    assert model.layers[2].down.bias.grad is None
    assert model.layers[0].calls == 0


def test_a_second_patch_of_the_same_kind_is_refused() -> None:
    model = Model()
    handle = anyrank.recompute_(model, "layers.1")
    with pytest.raises(ValueError, match=r"layers\.1 already has a recompute_ patch"):
        anyrank.recompute_(model, "layers.*")
    assert "forward" not in model.layers[0].__dict__
    handle.remove()
    anyrank.recompute_(model, "layers.*")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.*", r"matches no module of Model \(near: layers\.\d\)"),
        ("layers", r"layers is a ModuleList, which is never called. Did you mean layers\.\*"),
        ("", "matches no module|Did you mean"),
    ],
)
def test_a_pattern_that_names_nothing_to_call(pattern: str, message: str) -> None:
    model = Model()
    if pattern == "":  # the model itself has the empty name
        assert anyrank.recompute_(model, pattern).names == [""]
        return
    with pytest.raises(ValueError, match=message):
        anyrank.recompute_(model, pattern)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.mlp", False),
        ("layers.*.mlp", "layers.10.mlp", True),
        ("layers.*", "model.layers.0", False),
        ("**.layers.*", "model.layers.0", True),
        ("**.layers.*", "layers.0", True),
        ("layers.**", "layers.0.mlp.up", True),
        ("layers.1*", "layers.12", True),
        ("layers.1*", "layers.2", False),
        ("lay.rs", "layers", False),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert matcher(pattern)(name) is matches


def test_names_of_wrappers_do_not_matter() -> None:
    inside = nn.Module()
    inside.module = Model(1)
    assert anyrank.recompute_(inside, "layers.*").names == ["module.layers.0"]


class Wrapper(nn.Module):
    """As torch.compile and FSDP wrap a module, under a name of theirs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


def test_a_module_and_its_wrapper_are_patched_once() -> None:
    model = Model().double()
    model.layers[1] = Wrapper(Wrapper(model.layers[1]))
    assert anyrank.recompute_(model, "layers.*").names == ["layers.0", "layers.1", "layers.2"]


def test_a_compiled_layer_is_patched_once() -> None:
    model = Model().double()
    compiled: Any = torch.compile(model.layers[1], backend="eager")
    model.layers[1] = compiled
    assert anyrank.recompute_(model, "layers.*").names == ["layers.0", "layers.1", "layers.2"]


def test_a_broad_pattern_leaves_containers_out() -> None:
    names = anyrank.recompute_(Model(), "**").names
    assert "layers" not in names
    assert "layers.0" in names


def test_handles_are_removed_in_reverse_order() -> None:
    model = Model()
    first = anyrank.recompute_(model, "layers.*")
    second = anyrank.tile_(model, "layers.1", chunk_size=2)
    with pytest.raises(ValueError, match=r"layers\.1 was patched again after recompute_. Remove"):
        first.remove()
    assert "forward" in model.layers[0].__dict__
    second.remove()
    first.remove()
    assert all("forward" not in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize("patch", [anyrank.recompute_, anyrank.tile_])
def test_a_patched_model_is_not_pickled(patch: Any) -> None:
    model = Model()
    handle = patch(model, "layers.*")
    with pytest.raises(
        pickle.PicklingError, match=r"layers\.0 has a .*_ patch.* First call remove"
    ):
        pickle.dumps(model)
    handle.remove()
    assert isinstance(pickle.loads(pickle.dumps(model)), Model)


# -- a forward that is replaced later -------------------------------------------------------------


class Rows(nn.Module):
    """Counts the rows of each call of its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(WIDTH, WIDTH), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return self.linear(x)


def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.rows.append(len(x))
    return 2 * self.linear(x)


def tiled_rows(model: Any, x: torch.Tensor) -> list[int]:
    model[0].rows.clear()
    model(x).sum().backward()
    return model[0].rows


def by_method(module: Any) -> Any:
    return types.MethodType(fused, module)  # as Liger's and the hub's kernels


def by_partial(module: Any) -> Any:
    return functools.partial(fused, module)


def by_object(module: Any) -> Any:
    class Kernel:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return fused(module, x)

    return Kernel()


@pytest.mark.parametrize("patch", [anyrank.tile_, anyrank.recompute_])
@pytest.mark.parametrize("replace", [by_method, by_partial, by_object])
def test_a_forward_that_is_replaced_later_is_refused_at_its_first_call(
    patch: Any, replace: Any
) -> None:
    model: Any = nn.Sequential(Rows())
    x, options = torch.randn(4, WIDTH), {"chunk_size": 2} if patch is anyrank.tile_ else {}
    handle = patch(model, "0", **options)
    wanted = tiled_rows(model, x).copy()
    twin = copy.deepcopy(model)
    model[0].forward = now = replace(model[0])
    model[0].rows.clear()
    for _ in range(2):  # until somebody mends it
        with pytest.raises(ValueError, match=f"0: .* replaced its forward after {patch.__name__}"):
            model(x)
    assert model[0].rows == []  # nothing has run with all rows
    handle.remove()
    assert vars(model[0])["forward"] is now
    assert tiled_rows(model, x) == [4]
    patch(model, "0", **options)
    assert tiled_rows(model, x) == wanted
    assert tiled_rows(twin, x) == wanted


def around(model: Any) -> None:
    """As a decorator does."""
    inner = model[0].forward
    model[0].forward = lambda x: 2 * inner(x)


def by_timer(model: Any) -> None:
    """As a profiler does, by an object that keeps what it calls."""

    class Timer:
        def __init__(self, inner: Any) -> None:
            self.inner, self.calls = inner, 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return 2 * self.inner(x)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    model[0].forward = Timer(model[0].forward).run


def beside(model: Any) -> None:
    """As Accelerate does."""
    add_hook_to_module(model[0], ModelHook())


def for_all(model: Any) -> None:
    """As a patch of the class does, which the patch of the instance would hide."""
    type(model[0]).forward = fused


@pytest.mark.parametrize("replace", [around, by_timer, beside, for_all])
def test_what_calls_the_patched_forward_is_left_alone(
    replace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = (
        nn.Sequential(type("Own", (Rows,), {"forward": Rows.forward})()),
        torch.randn(4, WIDTH),
    )
    expected = model(x).detach()
    anyrank.tile_(model, "0", chunk_size=2)
    anyrank.recompute_(model, "0")
    wanted = tiled_rows(model, x).copy()
    replace(model)
    assert tiled_rows(model, x) == wanted
    assert torch.allclose(model(x), expected if replace is beside else 2 * expected)
    assert "its forward" not in caplog.text


def test_a_forward_that_is_taken_out_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(Rows()), torch.randn(4, WIDTH)
    anyrank.tile_(model, "0", chunk_size=2)
    del model[0].forward
    assert tiled_rows(model, x) == tiled_rows(model, x) == [4]
    assert caplog.text.count("its forward was removed after tile_") == 1


# -- objects that the function writes into --------------------------------------------------------


class Record:
    """A cache with a class of its own, that grows."""

    def __init__(self, kind: str) -> None:
        self.keys: Any = {"list": [], "dict": {}, "tensor": None}[kind]

    def update(self, key: torch.Tensor) -> torch.Tensor:
        if isinstance(self.keys, list):
            self.keys.append(key)
            return torch.cat(self.keys)
        if isinstance(self.keys, dict):
            self.keys[len(self.keys)] = key
            return torch.cat(list(self.keys.values()))
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        return self.keys


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, kind: str) -> None:
        self.keys = torch.zeros(0, WIDTH)

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, key])
        return self.keys


@pytest.mark.parametrize("make", [Record, Slotted])
@pytest.mark.parametrize("kind", ["list", "dict", "tensor"])
def test_an_object_that_the_function_fills_is_as_it_was_when_it_runs_again(
    make: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers, x = [nn.Linear(WIDTH, WIDTH) for _ in range(3)], torch.randn(2, WIDTH)

    def run(call: Callable[..., Any]) -> tuple[list[torch.Tensor], Any]:
        record, hidden = make(kind), x
        for layer in layers:

            def attend(hidden: torch.Tensor, record: Any, layer: nn.Module = layer) -> torch.Tensor:
                return hidden + torch.tanh(record.update(layer(hidden))).mean()

            hidden = call(attend, hidden, record)
        return list(
            torch.autograd.grad(hidden.sum(), [p for m in layers for p in m.parameters()])
        ), record

    plain, _ = run(lambda fn, *args: fn(*args))
    mine, record = run(anyrank.recompute)
    assert_equal(mine, plain)
    held = record.keys
    assert (held.shape[0] if isinstance(held, torch.Tensor) else 2 * len(held)) == 6  # once each
    told = [r.getMessage() for r in caplog.records if "stores tensors in args[1]" in r.getMessage()]
    assert len(told) <= 1


def test_a_tensor_in_an_object_that_is_changed_in_place_is_refused() -> None:
    record = Record("tensor")
    record.keys = torch.zeros(4)

    def write(x: torch.Tensor, record: Record) -> torch.Tensor:
        record.keys[1] = 2.0
        return x.sin()

    with pytest.raises(anyrank.RecomputeError, match=r"modifies args\[1\]\.keys in place"):
        anyrank.recompute(write, torch.zeros(2, requires_grad=True), record)
