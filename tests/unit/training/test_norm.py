"""The norm of gradients: exact sums, so that its bits depend on the values alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anyrank
from anyrank.training.gradients import norm
from anyrank.training.gradients.norm import clip_gradients, total_norm


def values(count: int, seed: int, spread: int = 20) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=g) * torch.randint(-spread, 1, (count,), generator=g).exp2()


def exact_norm(tensor: torch.Tensor) -> float:
    return math.sqrt(sum(Fraction(x) ** 2 for x in tensor.double().tolist()))


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.data())
def test_any_cut_and_any_order_give_the_same_bits(
    count: int, seed: int, data: st.DataObject
) -> None:
    flat = values(count, seed)
    whole = total_norm([flat], 2.0)
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(data.draw(st.integers(1, count - sum(sizes))))
    parts = data.draw(st.permutations(list(flat.split(sizes))))
    assert total_norm(parts, 2.0) == whole
    assert total_norm([part.flip(0) for part in parts], 2.0) == whole
    assert whole == pytest.approx(exact_norm(flat), rel=1e-12)


@pytest.mark.parametrize("norm_type", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_torchs_norm(norm_type: float, dtype: torch.dtype) -> None:
    parts = [values(1000, 1).to(dtype), values(30, 2).view(5, 6).to(dtype), torch.empty(0)]
    expected = torch.linalg.vector_norm(
        torch.cat([p.double().reshape(-1) for p in parts]), norm_type
    )
    assert total_norm(parts, norm_type) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-60, 1.0, 2.0**100])
def test_very_small_and_very_large_elements(scale: float) -> None:
    flat = values(500, 3) * scale
    assert total_norm([flat], 2.0) == pytest.approx(exact_norm(flat), rel=1e-9)


def test_many_small_beside_one_large() -> None:
    flat = torch.cat([torch.ones(1), torch.full((1 << 16,), 2.0**-24)])
    assert total_norm([flat], 2.0) == pytest.approx(exact_norm(flat), rel=1e-15)


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = values(5000, 4)
    whole = total_norm([flat], 2.0)
    monkeypatch.setattr(norm, "SLAB", 7)
    assert total_norm([flat], 2.0) == whole


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_complex_and_sparse_gradients() -> None:
    z = torch.tensor([3 + 4j, 1j])
    assert total_norm([z], 2.0) == pytest.approx(math.sqrt(26))
    at, elements = torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0])
    sparse = torch.sparse_coo_tensor(at, elements, (5,), check_invariants=True)
    assert total_norm([sparse], 2.0) == 5.0


@pytest.mark.parametrize(("bad", "expected"), [(math.inf, math.inf), (-math.inf, math.inf)])
def test_an_infinite_element_makes_the_norm_infinite(bad: float, expected: float) -> None:
    assert total_norm([torch.tensor([1.0, bad]), torch.ones(2)], 2.0) == expected


def test_nan_wins_over_infinity() -> None:
    parts = [torch.tensor([1.0, math.inf]), torch.tensor([math.nan])]
    assert math.isnan(total_norm(parts, 2.0))
    assert math.isnan(total_norm(parts, math.inf))


def test_no_gradient_has_norm_zero() -> None:
    assert total_norm([], 2.0) == 0.0
    assert total_norm([torch.zeros(3), torch.empty(0)], 2.0) == 0.0


def trained() -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(7, 3)),
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.ones(2)),
    ]
    for param in params[:2]:
        param.grad = torch.randn_like(param) * 10
    return params


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
def test_clipping_is_torchs(max_norm: float) -> None:
    mine, theirs = trained(), trained()
    found = clip_gradients(mine, max_norm, 2.0, False)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(found, expected)
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert mine[2].grad is None


def test_a_norm_that_is_not_finite() -> None:
    params = trained()
    assert params[0].grad is not None
    params[0].grad[0, 0] = math.inf
    before = params[0].grad.clone()
    with pytest.raises(RuntimeError, match=r"gradient norm .* is inf"):
        clip_gradients(params, 1.0, 2.0, True)
    assert torch.equal(params[0].grad, before)
    assert clip_gradients(params, 1.0, 2.0, False).item() == math.inf
    assert params[1].grad is not None
    assert torch.equal(params[1].grad, torch.zeros(5))


def steps(exact: bool = False) -> tuple[nn.Module, anyrank.ElasticLoader]:
    model = nn.Linear(4, 1)
    return model, anyrank.ElasticLoader(
        torch.randn(8, 4), global_batch=8, microbatch=4, exact=exact
    )


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_clips_the_gradients_of_its_model(exact: bool) -> None:
    model, loader = steps(exact)
    for step in loader:
        with pytest.raises(ValueError, match="after the loop over microbatches"):
            step.clip_grad_norm_(1.0)
        for batch in step.microbatches(model):
            with pytest.raises(ValueError, match="after the loop over microbatches"):
                step.clip_grad_norm_(1.0)
            step.backward(model(batch).square().mean() * 100)
        before = total_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0)
        assert step.clip_grad_norm_(0.5).item() == pytest.approx(before)
        assert step.clip_grad_norm_(math.inf).item() == pytest.approx(0.5, rel=1e-5)
