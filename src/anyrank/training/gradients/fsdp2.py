"""Facts about FSDP2 that the exchange of gradients needs and torch has no public way to read.

An FSDP2 module keeps its parameters in groups; a group is gathered, and its gradients are reduced,
as one. The names used here are compared with the installed torch before a model's first step, so
that a different version gives one error on every rank, not an AttributeError in the middle of a
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyrank.tensors.torch_classes import fsdp2_class

# The names that are read of a parameter's record, and of a group with exact=True.
GROUP_NAMES = (
    "_reduce_scatter_comm",
    "all_reduce_grads",
    "force_sum_reduction_for_comms",
    "gradient_divide_factor",
    "reduce_grads",
    "reduce_scatter_unused_params",
)
PARAMETER_NAMES = ("mp_policy", "sharded_param", "unsharded_accumulated_grad")


def parameter_groups(module: Any) -> Sequence[Any]:
    """Return the parameter groups of an FSDP2 module, each exchanged together.

    Raises:
        RuntimeError: this torch keeps them elsewhere; the error names its version.
    """
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13
        if not hasattr(state, "_fsdp_param_group"):
            raise _unknown_torch("FSDPState", "_fsdp_param_groups")
        groups = [state._fsdp_param_group]  # pyright: ignore[reportPrivateUsage]
    return [group for group in groups if group]


def check_names(modules: Sequence[Any], is_exact: bool) -> None:
    """Check that torch's FSDP2 has the names that steps read. Does not communicate.

    Args:
        modules: the FSDP2 modules of a model; the first one with parameters stands for all.
        is_exact: whether the names that exact=True reads of a group are needed too.

    Raises:
        RuntimeError: names the class, the name and torch's version; or exact=True on a torch
            before 2.13.
    """
    if modules and is_exact and not hasattr(fsdp2_class(), "set_reduce_scatter_unused_params"):
        raise RuntimeError(
            "exact=True under FSDP2 needs torch 2.13 or newer, because earlier versions of FSDP2 "
            "drop the gradients of unused parameters; this is torch "
            f"{torch.__version__}. Use DistributedDataParallel, or exact=False."
        )
    group = next((group for module in modules for group in parameter_groups(module)), None)
    if group is None:
        return
    needed = [(group, "mesh_info"), (group, "fsdp_params")]
    needed += [(group, name) for name in GROUP_NAMES if is_exact]
    for owner, name in needed:
        if not hasattr(owner, name):
            raise _unknown_torch(type(owner).__name__, name)
    for parameter in group.fsdp_params[:1]:
        for name in PARAMETER_NAMES:
            if not hasattr(parameter, name):
                raise _unknown_torch(type(parameter).__name__, name)


def _unknown_torch(owner: str, name: str) -> RuntimeError:
    """Return the error for a torch without a private name that anyrank needs."""
    return RuntimeError(
        f"torch {torch.__version__} has no {owner}.{name}, which anyrank needs for FSDP2. Install "
        "a torch version listed in the support table of anyrank's README."
    )


def drop_accumulated(module: Any) -> None:
    """Drop gradients that an FSDP2 module has added up and not reduced.

    They are stored beside the gradients that `zero_grad` resets, and would be part of the next
    step.
    """
    for parameter in (param for group in parameter_groups(module) for param in group.fsdp_params):
        whole = getattr(parameter, "unsharded_param", None)
        if whole is not None:
            whole.grad = None
        # Until torch 2.14 a sum in a wider dtype is stored separately; later it is the gradient
        # above.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
