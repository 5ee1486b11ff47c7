"""`tile` and `tile_` in one process, compared with the untiled call."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anyrank

WIDTH, HIDDEN, ROWS = 6, 9, 10


class Mlp(nn.Module):
    """Counts its calls; dropout, a second result, whole and tiled named arguments on request."""

    def __init__(self, dropout: float = 0.0, router: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = dropout
        self.router = router
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor, mask: Any = None, scale: Any = None) -> Any:
        self.rows.append(x.shape[1] if x.ndim == 3 else x.shape[0])
        if mask is not None:
            x = x * mask
        hidden = F.dropout(torch.tanh(self.up(x)), self.dropout)
        y = self.down(hidden)
        y = y if scale is None else y * scale
        return (y, {"logits": hidden * 2, "k": 2}) if self.router else y


def double(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def pass_of(result: Any, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result's tensors and the gradients of a loss that weighs each element differently."""
    tensors = [each for each in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(each)]
    loss = sum((t * torch.arange(1.0, t.numel() + 1).reshape(t.shape).sin()).sum() for t in tensors)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*(t.detach() for t in tensors), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_close(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 11),
    dim=st.sampled_from([0, 1, -2, -3]),
    layout=st.sampled_from(["dense", "transposed", "strided", "expanded", "chunk"]),
    frozen=st.booleans(),
    recomputed=st.booleans(),
)
def test_any_size_dim_and_layout_equals_untiled(
    rows: int, chunk: int, dim: int, layout: str, frozen: bool, recomputed: bool
) -> None:
    shape = (rows, 3, WIDTH) if dim in (0, -3) else (3, rows, WIDTH)
    x = double(*shape, grad=not frozen)
    seen = {
        "dense": lambda: x,
        "transposed": lambda: x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": lambda: torch.stack([x, x], -1).select(-1, 0),
        "expanded": lambda: x[:, :, :1].expand(shape),
        "chunk": lambda: torch.cat([x, x], -1).chunk(2, -1)[1],
    }[layout]
    module = Mlp().double()
    wanted = [*module.parameters(), *([] if frozen else [x])]
    plain = pass_of(module(seen()), wanted)
    tiled = anyrank.tile(module, chunk_size=chunk, in_dims=dim, out_dims=dim)
    call = functools.partial(anyrank.recompute, tiled) if recomputed else tiled
    assert_close(pass_of(call(seen()), wanted), plain)


CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, Any], Any]]] = {
    "keyword": ({}, lambda x, t: t(x=x)),
    "whole argument": ({}, lambda x, t: t(x, double(WIDTH))),
    "tuple": ({"in_dims": (1, 0)}, lambda x, t: t(x, double(ROWS, 1))),
    "names": ({"in_dims": {"x": 1, "scale": 0}}, lambda x, t: t(x, scale=double(ROWS, WIDTH))),
    "names in place": ({"in_dims": {"x": -2, "mask": 0}}, lambda x, t: t(x, double(ROWS, WIDTH))),
    "not given": ({"in_dims": {"x": 1, "mask": 0}}, lambda x, t: t(x)),
    "gradient of a keyword": (
        {"in_dims": {"x": 1, "scale": 1}},
        lambda x, t: t(x, scale=x.sin()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_tiled_or_passed_whole(case: str) -> None:
    options, call = CASES[case]
    module = Mlp().double()
    x = double(2, ROWS, WIDTH)
    wanted = [*module.parameters(), x]
    plain = pass_of(call(x, module), wanted)
    module.rows.clear()
    tiled = anyrank.tile(module, chunk_size=4, **options)
    assert_close(pass_of(call(x, tiled), wanted), plain)
    assert module.rows == [4, 4, 2, 2, 4, 4]  # backward begins with the last


def test_structures_of_arguments_and_results() -> None:
    x, y = double(2, ROWS, WIDTH), double(ROWS, WIDTH)

    def fn(pair: list[torch.Tensor], *, more: dict[str, Any]) -> Any:
        a, b = pair
        return {"sum": a * b + more["w"], "sin": (b.sin(), a.new_tensor(1.0).item())}

    kwargs: dict[str, Any] = {"more": {"w": double(WIDTH)}}
    plain = pass_of(fn([x, y], **kwargs), [x, y])
    tiled = anyrank.tile(fn, chunk_size=3, in_dims=([1, 0],), out_dims={"sum": 1, "sin": (0, None)})
    assert_close(pass_of(tiled([x, y], **kwargs), [x, y]), plain)
    assert tiled([x, y], **kwargs)["sin"][1] == 1.0


def test_a_whole_tensor_sums_its_gradient_over_the_tiles() -> None:
    x, weight = double(2, ROWS, WIDTH), double(WIDTH, WIDTH)

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    tiled = anyrank.tile(fn, chunk_size=3)
    assert_close(pass_of(tiled(x, weight), [x, weight]), pass_of(fn(x, weight), [x, weight]))


# -- how often, and what autograd may do with it --------------------------------------------------


@pytest.mark.parametrize("around", [anyrank.recompute, "torch"])
def test_inside_a_recomputed_block_the_function_runs_twice_per_tile(around: Any) -> None:
    if around == "torch":
        around = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    module, norm = Mlp().double(), nn.LayerNorm(WIDTH).double()
    x = double(2, ROWS, WIDTH)
    tiled = anyrank.tile(module, chunk_size=2)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + tiled(norm(x))

    wanted = [*module.parameters(), *norm.parameters(), x]
    plain = pass_of(x + module(norm(x)), wanted)
    module.rows.clear()
    ours = pass_of(around(block, x), wanted)
    assert_close(ours, plain)
    assert module.rows == [2] * 10


def test_backward_brings_the_input_back_once_for_all_tiles() -> None:
    opened: list[int] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        opened.append(1)
        return tensor.clone()

    x = double(2, ROWS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        result = anyrank.tile(torch.sin, chunk_size=2)(x * 1).sum()
    result.backward(retain_graph=True)
    assert len(opened) == 1
    result.backward()
    assert len(opened) == 2


@pytest.mark.parametrize("cut_off", [[0], [1], [2], [1, 2], [0, 2]])
def test_tiles_through_which_no_gradient_flows_give_zero(cut_off: list[int]) -> None:
    x = double(1, 9, WIDTH)
    torch.use_deterministic_algorithms(True)  # fills new memory with nan
    try:
        x.grad = None
        tiles = iter([0, 1, 2, *(n for n in (2, 1, 0) if n not in cut_off)])

        def fn(x: torch.Tensor) -> torch.Tensor:
            return x.detach() if next(tiles) in cut_off else x.sin()

        anyrank.tile(fn, chunk_size=3)(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    expected = x.detach().cos()
    for tile in cut_off:
        expected[:, 3 * tile : 3 * tile + 3] = 0
    torch.testing.assert_close(x.grad, expected)


def test_after_an_error_in_the_middle_the_next_step_is_right() -> None:
    module = Mlp().double()
    x = double(1, ROWS, WIDTH)
    wanted = [*module.parameters(), x]
    plain = pass_of(module(x), wanted)
    calls = 0

    def sometimes(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 8):  # in forward, and in backward of the next
            raise KeyError(calls)

    module.register_forward_pre_hook(sometimes)
    tiled = anyrank.tile(module, chunk_size=4, grad_dtype=torch.float64)
    with pytest.raises(KeyError):
        tiled(x)
    result = tiled(x)
    with pytest.raises(KeyError):
        torch.autograd.grad(result.sum(), wanted, retain_graph=True)
    assert_close(pass_of(result, wanted), plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_tiles_are_plain_calls(mode: Callable[[], Any]) -> None:
    module = Mlp(router=True)
    x = torch.randn(2, ROWS, WIDTH)
    with mode():
        ours, more = anyrank.tile(module, chunk_size=4)(x)
        plain, wanted = module(x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(more["logits"], wanted["logits"])
    assert module.rows == [4, 4, 2, 10]


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_no_more_rows_than_a_tile_is_one_plain_call(rows: int) -> None:
    module = Mlp()
    result = anyrank.tile(module, chunk_size=4)(torch.randn(2, rows, WIDTH))
    assert module.rows == [rows]
    assert type(result.grad_fn).__name__ != "PlaceBackward"


def test_autograd_adds_the_weight_gradients_of_all_tiles_in_place() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).double()
    x = double(1, ROWS, WIDTH, grad=False)
    sums: dict[str, int] = {}
    for name, fn in (("tiled", anyrank.tile(module, chunk_size=2)), ("plain", split_call(module))):
        with torch.profiler.profile(acc_events=True) as profile:
            fn(x).sum().backward()
        sums[name] = sum(e.count for e in profile.key_averages() if e.key == "aten::add")
        module.zero_grad()
    assert sums == {"tiled": 0, "plain": 1}


def split_call(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([module(part) for part in x.split(2, 1)], 1)


# -- grad_dtype -----------------------------------------------------------------------------------


def weight_error(fn: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> float:
    """How far the weight gradients are from those in float64, on average."""
    exact = copy.deepcopy(module).double()
    reference = torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters()))
    grads = torch.autograd.grad(fn(x).float().sum(), list(module.parameters()))
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(grads, reference, strict=True)]
    return sum(errors).item() / len(errors)


def test_wide_sums_make_many_tiles_as_exact_as_untiled() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).bfloat16()
    x = torch.randn(1, 2048, 64, dtype=torch.bfloat16)
    untiled = weight_error(module, module, x)
    narrow = weight_error(anyrank.tile(module, chunk_size=32), module, x)
    wide = weight_error(anyrank.tile(module, chunk_size=32, grad_dtype=torch.float32), module, x)
    assert narrow > 2 * untiled
    assert wide < 1.2 * untiled


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_a_parameter_that_wants_wide_gradients_gets_them() -> None:
    module = nn.Linear(8, 8).bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    x = torch.randn(1, 64, 8, dtype=torch.bfloat16)
    anyrank.tile(module, chunk_size=8, grad_dtype=torch.float32)(x).float().pow(2).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    rounded = module.weight.grad.bfloat16().float()
    assert not torch.equal(module.weight.grad, rounded)


# -- bad input ------------------------------------------------------------------------------------


X = torch.ones(2, ROWS, WIDTH)
WRONG: dict[str, tuple[dict[str, Any], Callable[[Any], Any], type[Exception], str]] = {
    "a dim that is not an int": (
        {"in_dims": (1.5,)},
        lambda t: t(X),
        TypeError,
        "an int or None., got 1.5",
    ),
    "no such dim": (
        {"in_dims": 3},
        lambda t: t(X),
        ValueError,
        r"dim 3 does not exist in the shape \[2, 10, 6\]",
    ),
    "too many": (
        {"in_dims": (1, 1)},
        lambda t: t(X),
        ValueError,
        r"2 entries, but the call has 1 positional argument\.",
    ),
    "no such name": ({"in_dims": {"y": 1}}, lambda t: t(X), ValueError, r"names \['y'\]"),
    "no tensor": ({"in_dims": {"scale": 1}}, lambda t: t(X), ValueError, "names no tensor"),
    "no argument": ({}, lambda t: t(), ValueError, "names no tensor"),
    "other sizes": (
        {"in_dims": (1, 0)},
        lambda t: t(X, X[0, :3]),
        ValueError,
        r"args\[0\] has 10, args\[1\] has 3",
    ),
    "other structure": (
        {"in_dims": ([1],)},
        lambda t: t(X),
        ValueError,
        "do not match the structure",
    ),
    "out_dims": (
        {"out_dims": 2},
        lambda t: t(X),
        ValueError,
        r"returns shape \[2, 4, 6\], expected \[2, 4, 4",
    ),
    "out_dims none": ({"out_dims": None}, lambda t: t(X), ValueError, "has None in out_dims"),
    "out_dims pair": (
        {"out_dims": (1, 1)},
        lambda t: t(X),
        ValueError,
        "do not match the structure",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_say_what_is_wrong(case: str) -> None:
    options, call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call(anyrank.tile(Mlp(), **{"chunk_size": 4, **options}))


@dataclasses.dataclass
class Output:
    """A result of a kind that pytree does not know."""

    value: torch.Tensor


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x if x.shape[1] == 4 else x.float(), "tile 2 returns torch.float32, but tile 0"),
        (lambda x: Output(x), "returns a Output, whose tensors cannot be joined"),
        (lambda x: x[:, :3], "tile 0 returns shape .2, 3, 6., expected .2, 4, 6."),
        (lambda x: x.sum(), "dim 1 does not exist in the shape"),
        (lambda x: (x, x.shape[1]), "tile 2 returns 2, but tile 0 returned 4 in its place"),
        (lambda x: [x] * x.shape[1], "tile 2 returns a different structure"),
        (lambda x: x if x.shape[1] == 4 else x[..., 1:], "tile 2 returns"),
    ],
)
def test_results_that_cannot_be_joined(fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        anyrank.tile(fn, chunk_size=4)(double(2, ROWS, WIDTH))


class Router(nn.Module):
    """Leaves a loss of its router in an attribute."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.detaches = detaches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.router(x).logsumexp(-1).mean()
        self.aux = loss.detach() if self.detaches else loss
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_loss_left_in_an_attribute_is_refused_by_name(kind: str) -> None:
    module = nn.Sequential(Router(detaches=False))
    tiled = anyrank.tile(module if kind == "module" else lambda x: module(x), chunk_size=4)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"in the attribute 0\.aux"):
            tiled(torch.randn(2, ROWS, WIDTH))


def test_attributes_that_do_not_depend_on_the_rows_are_none_of_it() -> None:
    module = nn.Sequential(Router(detaches=True), nn.Linear(WIDTH, WIDTH))
    torch.nn.utils.prune.l1_unstructured(module[1], "weight", 0.5)
    anyrank.tile(module, chunk_size=4)(torch.randn(2, ROWS, WIDTH)).sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_a_contiguous_input_has_contiguous_tiles(grad: bool) -> None:
    def flat(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x.view(-1, WIDTH)).view(x.shape)
        if y.requires_grad:
            y.register_hook(lambda g: g.view(-1, WIDTH).view(g.shape))
        return y

    x = double(3, ROWS, WIDTH)
    tiled = anyrank.tile(flat, chunk_size=4)
    with torch.set_grad_enabled(grad):
        plain, ours = flat(x), tiled(x)
    assert torch.equal(ours, plain)
    if grad:
        assert_close(pass_of(tiled(x), [x]), pass_of(flat(x), [x]))


def test_wide_sums_reach_the_modules_of_a_function() -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False).bfloat16()
    x = torch.randn(1, 2048, 64, dtype=torch.bfloat16)
    untiled = weight_error(module, module, x)
    tiled = anyrank.tile(lambda x: module(x), chunk_size=32, grad_dtype=torch.float32)
    assert weight_error(tiled, module, x) < 1.7 * untiled
    narrow = anyrank.tile(lambda x: module(x), chunk_size=32)
    assert weight_error(narrow, module, x) > 2.5 * untiled


def test_wide_sums_need_a_module() -> None:
    with pytest.raises(TypeError, match="grad_dtype= needs the parameters of a module"):
        anyrank.tile(torch.sin, grad_dtype=torch.float32)


# -- tile_ ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
def test_patched_modules_are_tiled_until_the_handle_undoes_it(
    grad_dtype: torch.dtype | None,
) -> None:
    model = nn.Sequential(Block(), Block()).double()
    x = double(2, ROWS, WIDTH)
    wanted = [*model.parameters(), x]
    plain = pass_of(model(x), wanted)
    names = list(model.state_dict())
    tiles = anyrank.tile_(model, "*.mlp", chunk_size=4, grad_dtype=grad_dtype)
    blocks = anyrank.recompute_(model, "*")
    assert (tiles.names, blocks.names) == (["0.mlp", "1.mlp"], ["0", "1"])
    assert_close(pass_of(model(x), wanted), plain)
    for block in model:
        block.mlp.rows.clear()
    assert_close(pass_of(model(x), wanted), plain)
    assert [block.mlp.rows for block in model] == [[4, 4, 2, 2, 4, 4]] * 2
    twin = copy.deepcopy(model)
    assert_close(pass_of(twin(x), [*twin.parameters(), x]), plain)
    tiles.remove()
    blocks.remove()
    assert list(model.state_dict()) == names
    model[0].mlp.rows.clear()
    assert_close(pass_of(model(x), wanted), plain)
    assert model[0].mlp.rows == [10]


def test_a_module_may_be_tiled_and_recomputed() -> None:
    module = nn.Sequential(Mlp().double())
    x = double(2, ROWS, WIDTH)
    wanted = [*module.parameters(), x]
    plain = pass_of(module(x), wanted)
    blocks = anyrank.recompute_(module, "0")
    tiles = anyrank.tile_(module, "0", chunk_size=4)
    assert_close(pass_of(module(x), wanted), plain)
    tiles.remove()
    assert_close(pass_of(module(x), wanted), plain)
    blocks.remove()
    assert "forward" not in module[0].__dict__


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (2, ROWS, WIDTH), (2, 2, ROWS, WIDTH)])
def test_the_dim_before_the_features_is_tiled_whatever_the_rank(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)))
    rows: list[int] = []
    model[0][0].register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    x = torch.randn(shape)
    plain = model(x)
    anyrank.tile_(model, "0", chunk_size=4)
    rows.clear()
    torch.testing.assert_close(model(x), plain)
    assert rows == [4, 4, 2]
