"""`tiled_loss` in one process, compared with the loss of all logits at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import anyrank

WIDTH, VOCAB = 6, 11


def data(*shape: int, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + sum(shape))
    hidden = torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCAB, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), labels


def head(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB, bias=bias, dtype=torch.float64)


def full(
    module: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, **options: Any
) -> torch.Tensor:
    logits = module(hidden.reshape(-1, WIDTH))
    return F.cross_entropy(logits, labels.reshape(-1), **options)


def with_grads(loss: torch.Tensor, module: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    wanted = [hidden, *(p for p in module.parameters() if p.requires_grad)]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def assert_close(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)


# A plain head's gradients are computed in the forward pass, any other module's logits twice.
AS: dict[str, Any] = {"fused": lambda module: module, "recompute": nn.Sequential}


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(1,), (7,), (12,), (3, 5), (2, 3, 2)]),
    chunk=st.integers(1, 16),
    reduction=st.sampled_from(["mean", "sum"]),
    impl=st.sampled_from(["recompute", "fused"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    bias=st.booleans(),
    frozen=st.sampled_from(["nothing", "hidden", "weight", "bias"]),
    factor=st.sampled_from([1.0, 0.25, 65536.0]),
)
def test_it_equals_the_loss_of_all_logits(
    shape: tuple[int, ...],
    chunk: int,
    reduction: Any,
    impl: Any,
    smoothing: float,
    bias: bool,
    frozen: str,
    factor: float,
) -> None:
    module = head(bias)
    hidden, labels = data(*shape)
    labels.view(-1)[0] = 3
    if frozen == "hidden":
        hidden.requires_grad_(False)
    elif frozen != "nothing" and getattr(module, frozen) is not None:
        getattr(module, frozen).requires_grad_(False)
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    ours = anyrank.tiled_loss(AS[impl](module), hidden, labels, chunk_size=chunk, **options)
    plain = full(module, hidden, labels, **options)
    assert_close(
        with_grads(ours * factor, module, hidden), with_grads(plain * factor, module, hidden)
    )


@pytest.mark.parametrize("impl", ["fused", "recompute"])
def test_losses_of_single_tokens(impl: Any) -> None:
    module = head()
    hidden, labels = data(3, 5)
    weights = torch.arange(15.0).reshape(3, 5)
    ours = anyrank.tiled_loss(AS[impl](module), hidden, labels, chunk_size=4, reduction="none")
    plain = full(module, hidden, labels, reduction="none").reshape(3, 5)
    assert ours.shape == labels.shape
    torch.testing.assert_close(ours, plain)
    assert (ours[labels == -100] == 0).all()
    assert_close(
        with_grads((ours * weights).sum(), module, hidden),
        with_grads((plain * weights).sum(), module, hidden),
    )


@pytest.mark.parametrize("impl", ["recompute", "fused"])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_the_mean_may_be_over_more_than_this_ranks_tokens(impl: Any, kind: str) -> None:
    module = head()
    hidden, labels = data(9)
    count = 40 if kind == "number" else torch.tensor(40)
    ours = anyrank.tiled_loss(AS[impl](module), hidden, labels, chunk_size=4, count=count)
    plain = full(module, hidden, labels, reduction="sum") / 40
    assert_close(with_grads(ours, module, hidden), with_grads(plain, module, hidden))


@pytest.mark.parametrize("impl", ["recompute", "fused"])
@pytest.mark.parametrize("shape", [(4,), (0,), (12,)])
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0), torch.tensor(0.0)])
def test_no_tokens_give_zero_with_a_graph(impl: Any, shape: tuple[int, ...], count: Any) -> None:
    module = head()
    hidden, labels = data(*shape)
    labels.fill_(-100)
    loss = anyrank.tiled_loss(AS[impl](module), hidden, labels, chunk_size=5, count=count)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, [hidden, *module.parameters()]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_class_weights_as_documented() -> None:
    module = head()
    hidden, labels = data(9)
    weights = torch.rand(VOCAB, dtype=torch.float64) + 0.1

    def weighted(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(h), y, weights, reduction="none")

    count = weights[labels.clamp(min=0)][labels != -100].sum()
    ours = anyrank.tiled_loss(weighted, hidden, labels, chunk_size=4, count=count)
    plain = full(module, hidden, labels, weight=weights)
    assert_close(with_grads(ours, module, hidden), with_grads(plain, module, hidden))


def test_what_begins_like_the_labels_is_cut_unless_it_is_bound() -> None:
    hidden, labels = data(VOCAB, ignored=0)  # as many tokens as classes
    prior, advantage = torch.rand(VOCAB), torch.rand(VOCAB)
    seen: list[tuple[int, int]] = []

    def fn(h: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((len(a), len(b)))
        return h.sum(-1)

    anyrank.tiled_loss(fn, hidden, labels, prior, advantage, chunk_size=4)
    anyrank.tiled_loss(functools.partial(fn, b=prior), hidden, labels, advantage, chunk_size=4)
    assert seen == [(n, n) for n in (4, 4, 3)] + [(n, VOCAB) for n in (4, 4, 3)]


class Lora(nn.Module):
    """A head with an adapter on a frozen base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = head().requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        self.b = nn.Linear(2, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_any_module_can_be_the_head() -> None:
    module = Lora()
    hidden, labels = data(3, 5)
    ours = anyrank.tiled_loss(module, hidden, labels, chunk_size=4)
    assert_close(
        with_grads(ours, module, hidden), with_grads(full(module, hidden, labels), module, hidden)
    )


def of_all_modules(module: nn.Linear) -> Any:
    register: Any = nn.modules.module.register_module_forward_hook
    return register(lambda called, args, result: 2 * result)


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda *a: 2 * a[-1]),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, g, __: (2 * g[0],)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, g: (2 * g[0],)),
    "of all modules": of_all_modules,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_head_are_run(kind: str) -> None:
    module = head()
    handle = HOOKS[kind](module)
    try:
        hidden, labels = data(9, ignored=0)
        ours = anyrank.tiled_loss(module, hidden, labels, chunk_size=4)
        plain = with_grads(full(module, hidden, labels), module, hidden)
        assert_close(with_grads(ours, module, hidden), plain)
    finally:
        handle.remove()


def test_any_function_of_a_tile_can_be_the_loss() -> None:
    module = head()
    hidden, labels = data(3, 5)
    advantage, scale = torch.randn(3, 5, dtype=torch.float64), torch.tensor(2.0)

    def fn(h: torch.Tensor, y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        logits = 5 * torch.tanh(module(h) / 5)
        z = torch.logsumexp(logits, -1)
        loss = F.cross_entropy(logits, y, reduction="none") + 1e-2 * z**2
        return loss * rest[0] * rest[1]

    ours = anyrank.tiled_loss(fn, hidden, labels, advantage, scale, chunk_size=4)
    valid = labels.reshape(-1) != -100
    plain = fn(hidden.reshape(-1, WIDTH), labels.reshape(-1), advantage.reshape(-1), scale)[valid]
    assert_close(with_grads(ours, module, hidden), with_grads(plain.mean(), module, hidden))


def test_a_weight_may_be_an_argument_and_tied_to_the_embedding() -> None:
    embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
    _, labels = data(VOCAB, ignored=0)  # as many tokens as classes: a parameter is never cut

    def fn(h: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(h @ weight.t(), y, reduction="none")

    def grads(loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [embed.weight])]

    plain = grads(F.cross_entropy(embed(labels) @ embed.weight.t(), labels))
    ours = anyrank.tiled_loss(fn, embed(labels), labels, embed.weight, chunk_size=4)
    assert_close(grads(ours), plain)
    tied = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    tied.weight = embed.weight
    fired: list[torch.Tensor] = []
    handle = embed.weight.register_hook(fired.append)
    assert_close(grads(anyrank.tiled_loss(tied, embed(labels), labels)), plain)
    assert len(fired) == 1
    handle.remove()


def test_low_precision_is_as_exact_as_all_logits_at_once() -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 512, bias=False)
    hidden, labels = torch.randn(256, 64), torch.randint(512, (256,))
    exact = torch.autograd.grad(F.cross_entropy(module(hidden), labels), module.weight)[0]
    module, hidden = module.bfloat16(), hidden.bfloat16()

    def error(loss: torch.Tensor) -> float:
        grad = torch.autograd.grad(loss, module.weight)[0]
        return ((grad.float() - exact).norm() / exact.norm()).item()

    plain = error(F.cross_entropy(module(hidden).float(), labels))
    fused = anyrank.tiled_loss(module, hidden, labels, chunk_size=64)
    assert fused.dtype == torch.float32
    assert error(fused) < 1.5 * plain


@pytest.mark.parametrize("way", ["fused", "recompute", "function"])
def test_wide_sums_make_many_tiles_as_exact_as_few(way: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 256).bfloat16()
    hidden, labels = torch.randn(4096, 64).bfloat16(), torch.randint(256, (4096,))
    exact = copy.deepcopy(module).double()
    wanted = torch.autograd.grad(F.cross_entropy(exact(hidden.double()), labels), exact.weight)[0]

    def error(loss: torch.Tensor) -> float:
        grad = torch.autograd.grad(loss, module.weight)[0]
        assert grad.dtype == torch.bfloat16
        return ((grad.double() - wanted).norm() / wanted.norm()).item()

    def capless(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(h).float(), y, reduction="none")

    def ours(dtype: torch.dtype | None) -> torch.Tensor:
        fn: Any = capless if way == "function" else AS[way](module)
        return anyrank.tiled_loss(fn, hidden, labels, chunk_size=32, grad_dtype=dtype)

    plain = error(F.cross_entropy(module(hidden).float(), labels))
    assert error(ours(None)) > 4 * plain
    assert error(ours(torch.float32)) < 1.5 * plain


def test_no_more_logits_than_a_tile_ever_exist() -> None:
    module = head()
    rows: list[int] = []
    module.register_forward_hook(lambda m, args, out: rows.append(len(out)))
    hidden, labels = data(10)
    anyrank.tiled_loss(module, hidden, labels, chunk_size=4).backward()
    assert rows == [4, 4, 2, 2, 4, 4]


def test_fake_tensors_show_the_memory_of_the_fused_form() -> None:
    with FakeTensorMode():
        module, hidden = nn.Linear(4, 9), torch.randn(6, 4, requires_grad=True)
        labels = torch.zeros(6, dtype=torch.int64)
        loss = anyrank.tiled_loss(module, hidden, labels, chunk_size=4)
        loss.backward()
        assert hidden.grad is not None


def test_a_fused_loss_is_differentiated_once() -> None:
    module = head()
    hidden, labels = data(10)
    loss = anyrank.tiled_loss(module, hidden, labels)
    with pytest.raises(anyrank.RecomputeError, match=r"pass nn\.Sequential\(head\)"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(anyrank.RecomputeError, match="supports a single backward"):
        loss.backward()
    loss = anyrank.tiled_loss(nn.Sequential(module), hidden, labels, chunk_size=4)
    loss.backward(retain_graph=True)
    loss.backward()


def scalar(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return h.sum()


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shapes": (
        head(),
        {"labels": torch.zeros(3, dtype=torch.long)},
        r"\[10, 6\], and labels \[3\]",
    ),
    "count": (head(), {"count": 3, "reduction": "sum"}, "count= is the divisor"),
    "counts": (head(), {"count": torch.ones(2)}, r"count=: expected one number, .* shape \[2\]"),
    "smoothing": (scalar, {"label_smoothing": 0.1}, "label_smoothing= needs a head"),
    "scalar": (scalar, {}, r"scalar returned \[\] for a tile of 4 tokens, expected \[4\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_say_what_is_wrong(case: str) -> None:
    fn, options, message = WRONG[case]
    hidden, labels = data(10)
    options = {"labels": labels, "chunk_size": 4, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        anyrank.tiled_loss(fn, hidden, **options)


FORMS = [("fused", "mean"), ("recompute", "mean"), ("fused", "none")]


def by_form(
    form: tuple[str, Any], module: nn.Module, hidden: Any, labels: Any, **options: Any
) -> torch.Tensor:
    kind, reduction = form
    return anyrank.tiled_loss(
        AS[kind](module), hidden, labels, chunk_size=4, reduction=reduction, **options
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_every_form_takes_labels_of_any_integers(dtype: torch.dtype, form: Any) -> None:
    module = head()
    hidden, labels = data(10, ignored=0)
    plain = full(module, hidden, labels)
    mine = by_form(form, module, hidden, labels.to(dtype)).mean()
    assert_close(with_grads(mine, module, hidden), with_grads(plain, module, hidden))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_every_form_refuses_labels_that_are_no_integers(dtype: torch.dtype, form: Any) -> None:
    hidden, labels = data(10)
    with pytest.raises(
        TypeError, match=rf"labels=: expected class indices \(integers\), got {dtype}"
    ):
        by_form(form, head(), hidden, labels.to(dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan")])
def test_every_form_refuses_a_smoothing_out_of_range(smoothing: float, form: Any) -> None:
    hidden, labels = data(10)
    with pytest.raises(ValueError, match=r"label_smoothing=.*: must be from 0 to 1"):
        by_form(form, head(), hidden, labels, label_smoothing=smoothing)


def test_a_head_takes_no_more_arguments() -> None:
    hidden, labels = data(10)
    with pytest.raises(ValueError, match="a head is called only with hidden states"):
        anyrank.tiled_loss(head(), hidden, labels, labels)
