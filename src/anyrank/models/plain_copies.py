"""Copies of a model in its author's classes, to run its own methods on different values."""

from __future__ import annotations

from typing import Any

from torch import nn

from anyrank.models.dialects.frozen.freeze import unfrozen_attributes
from anyrank.models.frozen_parts import frozen_info
from anyrank.models.wrappers import plain_class


def plain_copy(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> Any:
    """Copy the module tree, unfrozen and in the user's own classes; everything else is shared.

    Args:
        module: the module, which is not changed.
        copies: receives the copy of each module, by the id of the module.
    """
    copies = {} if copies is None else copies
    if id(module) not in copies:
        kind = plain_class(module)
        copy: Any = kind.__new__(kind)
        copies[id(module)] = copy
        copy.__dict__ = {**module.__dict__}
        if frozen_info(module):
            copy.__dict__ = unfrozen_attributes(module.__dict__)
        copy.__dict__["_modules"] = {
            name: None if child is None else plain_copy(child, copies)
            for name, child in module.__dict__["_modules"].items()
        }
    return copies[id(module)]
