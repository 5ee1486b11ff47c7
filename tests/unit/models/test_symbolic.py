"""Conversions on headers: a symbolic tensor moves its elements as the real one does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyrank.errors import LoadError
from anyrank.models.dialects.transformers.symbolic import SymbolicTensor
from anyrank.tensors.spec import StoredTensor


def symbolic(shape: tuple[int, ...]) -> tuple[SymbolicTensor, torch.Tensor]:
    """A stored tensor, and the one that it stands for."""
    stored = StoredTensor.contiguous("w", shape, torch.float32, 0, 0)
    return SymbolicTensor(stored), torch.arange(float(math.prod(shape))).view(shape)


def read(tensor: SymbolicTensor, flat: torch.Tensor) -> torch.Tensor:
    made = torch.full(tuple(tensor.shape), -1.0)
    for chunk in tensor.stored.chunks:
        made[chunk.box.slices()] = flat.as_strided(
            chunk.box.sizes, chunk.strides, chunk.offset // 4
        )
    return made


@st.composite
def factors(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    shape: list[int] = []
    while total > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0])))
        total //= shape[-1]
    return (*shape, total)


@given(st.data())
def test_reshape_of_a_permuted_tensor_is_torchs_or_refused(data: st.DataObject) -> None:
    total = data.draw(st.sampled_from([16, 24, 36]))
    before, after = data.draw(factors(total)), data.draw(factors(total))
    order = data.draw(st.permutations(range(len(before))))
    tensor, real = symbolic(before)
    try:
        made = tensor.permute(list(order)).reshape(after)
    except LoadError:
        with pytest.raises(RuntimeError):  # nothing that is a view is refused
            real.permute(order).view(after)
        return
    assert torch.equal(read(made, real.flatten()), real.permute(order).reshape(after))
