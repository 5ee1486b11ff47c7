"""Optimizers whose update of an element does not depend on shard boundaries.

On a different number of ranks FSDP2's shards end at different elements. Kernels may round the
elements at the end of a tensor differently (fused ones do, and those for two-byte types), and
optimizers may use a whole shard (norms, rows, blocks). A table lists the proved cases: for each row
a test splits tensors on the installed torch. An optimizer that is in no row is reported, and may
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from anyrank.tensors.torch_classes import is_dtensor


@dataclass(frozen=True)
class Proved:
    """An optimizer whose step treats each element by itself, in float32 and float64.

    Attributes:
        low: proved in bfloat16 and float16 too.
        is_complex: also proved for sharded complex parameters, without torch.view_as_real.
        fused: also proved with fused=True on the CPU, in float32 and float64.
    """

    low: bool = False
    is_complex: bool = False
    fused: bool = False


PROVED: dict[type[optim.Optimizer], Proved] = {
    optim.Adadelta: Proved(),
    optim.Adagrad: Proved(fused=True),
    optim.Adam: Proved(),
    optim.AdamW: Proved(low=True),
    optim.Adamax: Proved(),
    optim.ASGD: Proved(),
    optim.NAdam: Proved(),
    optim.RAdam: Proved(),
    optim.RMSprop: Proved(),
    optim.Rprop: Proved(low=True),
    optim.SGD: Proved(is_complex=True),
}
DEPENDING: dict[type[optim.Optimizer], str] = {
    optim.Adafactor: "its means run over rows and whole tensors, of which each rank has a part",
    optim.LBFGS: "its dot products run over the whole model, of which each rank has a part",
}


def judge(
    kind: type[optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: str
) -> str | None:
    """Check if an optimizer's update of a sharded parameter depends on shard boundaries.

    Args:
        kind: its class; a subclass of one in the table is in no row.
        options: options of the parameter's group.
        dtype: dtype of the parameter.
        device: type of its device.

    Returns:
        None if it is proved not to, else a sentence that says what is not proved.

    Raises:
        ValueError: it is known to; the error names the way out.
    """
    name = f"exact=True: {kind.__name__}"
    if reason := DEPENDING.get(kind):
        raise ValueError(
            f"{name} steps sharded parameters, but {reason}. Use DistributedDataParallel, or a "
            "different optimizer."
        )
    row = PROVED.get(kind)
    is_fused = bool(options.get("fused"))
    if row is None or (is_fused and device != "cpu"):
        return (
            f"{name}{'(fused=True)' * is_fused} is not verified to give the same bits when shards "
            "have different boundaries, as on a different number of ranks. Purely elementwise "
            "optimizers do; optimizers that use norms, rows or blocks of a tensor do not. If it is "
            "not elementwise, use DistributedDataParallel"
        )
    if dtype.is_complex and not row.is_complex:
        raise ValueError(
            f"{name} steps a sharded parameter of {dtype} by torch.view_as_real, which returns a "
            "copy of it on several ranks, so that the step is lost. Make it a parameter of real "
            "numbers with a last dimension of 2, and call torch.view_as_complex in the forward; or "
            "use SGD, or DistributedDataParallel."
        )
    if dtype.itemsize == 2 and not row.low:
        raise ValueError(
            f"{name}'s result for {dtype} depends on where a shard ends, and so on the number of "
            "ranks; for float32 it does not. Use AdamW, or keep sharded parameters in float32, "
            "with fully_shard(..., "
            f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)), or "
            "use DistributedDataParallel."
        )
    if is_fused and not (row.fused and dtype.itemsize > 2):
        raise ValueError(
            f"{name}(fused=True) steps sharded parameters, and its kernel rounds the elements at "
            "the end of a shard differently. Build it with foreach=True or foreach=False."
        )
    return None


def judge_optimizer(optimizer: optim.Optimizer) -> Iterator[str]:
    """Yield what is not proved about an optimizer's sharded parameters; raise like `judge`."""
    for group in optimizer.param_groups:
        kinds = {
            (parameter.dtype, parameter.device.type)
            for parameter in group["params"]
            if is_dtensor(parameter)
            and any(placement.is_shard() for placement in parameter.placements)
        }
        for dtype, device in sorted(kinds, key=str):
            if note := judge(type(optimizer), group, dtype, device):
                yield note
