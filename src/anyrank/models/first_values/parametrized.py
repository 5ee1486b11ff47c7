"""Parametrized tensors (weight_norm), which get no first values from any rule."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn.utils.parametrize import ParametrizationList

from anyrank.models.tensors import ModelTensor
from anyrank.wording import first_few


def parametrized(targets: Iterable[ModelTensor]) -> list[str]:
    """Name parametrized tensors that need first values.

    The rules of modules know only the tensors that the parametrization replaced.
    """
    names = [
        target.name
        for target in targets
        if isinstance(target.registrations[0].module, ParametrizationList)
    ]
    if not names:
        return []
    return [
        f"{', '.join(first_few(names, 10))}: no rule gives first values to parametrized tensors "
        "(weight_norm, ...): build these modules on the CPU (without anyrank.meta()), or load "
        "their weights"
    ]
