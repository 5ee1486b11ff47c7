"""Knows which optimizers give an element the same bits wherever it stands in a shard.

On another number of ranks FSDP2's shards end elsewhere. Kernels may round the elements at the end
of a tensor in another way (fused ones do, and those for two-byte types), and optimizers may look
at a whole shard (norms, rows, blocks). A table lists the proved cases: for each row a test cuts
tensors on the installed torch. An optimizer that is in no row is noted, and may step.
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
    """An optimizer whose step treats each element on its own, in float32 and float64.

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
    """Judge if an optimizer gives an element of a sharded parameter the same bits in any shard.

    Args:
        kind: its class; a class derived from one of the table is in no row.
        options: options of the parameter's group.
        dtype: dtype of the parameter.
        device: type of its device.

    Returns:
        None if it is proved, else a sentence that says what is not.

    Raises:
        ValueError: it is known not to; names the way out.
    """
    name = f"exact=True: {kind.__name__}"
    if reason := DEPENDING.get(kind):
        raise ValueError(
            f"{name} steps sharded parameters, and {reason}: use DistributedDataParallel, or "
            "another optimizer"
        )
    row = PROVED.get(kind)
    is_fused = bool(options.get("fused"))
    if row is None or (is_fused and device != "cpu"):
        return (
            f"{name}{'(fused=True)' * is_fused} steps sharded parameters, and is not proved to "
            "give an element the same bits where its shard ends elsewhere, as shards do on "
            "another number of ranks: one that treats each element by itself does, one with "
            "norms, rows or blocks of a tensor does not, so use DistributedDataParallel for it"
        )
    if dtype.is_complex and not row.is_complex:
        raise ValueError(
            f"{name} steps a sharded parameter of {dtype} by torch.view_as_real, which gives a "
            "copy of it on several ranks, so that the step is lost: make it a parameter of real "
            "numbers with a last dimension of 2, and call torch.view_as_complex in the forward; or "
            "use SGD, or DistributedDataParallel"
        )
    if dtype.itemsize == 2 and not row.low:
        raise ValueError(
            f"{name} gives an element of {dtype} other bits where its shard ends elsewhere, as "
            "shards do on another number of ranks, and one of float32 the same: use AdamW, or keep "
            "sharded parameters in float32, with fully_shard(..., "
            f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)), or "
            "use DistributedDataParallel"
        )
    if is_fused and not (row.fused and dtype.itemsize > 2):
        raise ValueError(
            f"{name}(fused=True) steps sharded parameters, and its kernel rounds the elements at "
            "the end of a shard in another way: build it with foreach=True or foreach=False"
        )
    return None


def judge_optimizer(optimizer: optim.Optimizer) -> Iterator[str]:
    """Yield what is not proved of an optimizer's sharded parameters; raises like `judge`."""
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
