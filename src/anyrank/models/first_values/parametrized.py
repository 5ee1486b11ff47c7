"""Parametrized tensors (weight_norm), to which no rule gives initial values."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn.utils.parametrize import ParametrizationList

from anyrank.models.tensors import ModelTensor
from anyrank.wording import first_few


def parametrized(targets: Iterable[ModelTensor]) -> list[str]:
    """Return the error text for parametrized tensors that need initial values.

    The rules of modules know only the tensors that the parametrization has replaced.
    """
    names = [
        target.name
        for target in targets
        if isinstance(target.registrations[0].module, ParametrizationList)
    ]
    if not names:
        return []
    return [
        f"{', '.join(first_few(names, 10))}: no rule gives initial values to parametrized tensors "
        "(weight_norm, ...). Build these modules on the CPU, without anyrank.meta(), or load "
        "their weights."
    ]
