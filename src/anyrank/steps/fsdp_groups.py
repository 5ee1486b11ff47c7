"""What the exchange of gradients has to know of FSDP2 and torch has no public way to ask for.

An FSDP2 module keeps its parameters in groups; a group is gathered, and its gradients are reduced,
as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def parameter_groups(module: Any) -> Sequence[Any]:
    """The parameter groups of an FSDP2 module, each exchanged together."""
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups  # pyright: ignore[reportPrivateUsage]
    else:  # torch before 2.13
        groups = [state._fsdp_param_group]  # pyright: ignore[reportPrivateUsage]
    return [group for group in groups if group]


def drop_accumulated(module: Any) -> None:
    """Drop gradients that an FSDP2 module has added up and not exchanged.

    They lie beside the gradients that `zero_grad` resets, and would be part of the next step.
    """
    for parameter in (param for group in parameter_groups(module) for param in group.fsdp_params):
        whole = getattr(parameter, "unsharded_param", None)
        if whole is not None:
            whole.grad = None
        # Until torch 2.14 a sum in a wider dtype lies apart; later it is the gradient above.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
