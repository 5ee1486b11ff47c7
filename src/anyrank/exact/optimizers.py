"""Which optimizers give an element the same bits wherever it stands in a shard.

On another number of ranks FSDP2's shards end elsewhere. Kernels may round the elements at the end
of a tensor in another way (fused ones do, and those of two bytes), and optimizers may look over a
whole shard (norms, rows, blocks). What is proved stands in a table: a test cuts tensors for each
row, on the installed torch. An optimizer that is in no row is noted, and steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Proved:
    """An optimizer whose step treats each element by itself, in float32 and float64.

    Attributes:
        low: in bfloat16 and float16 too.
        fused: with fused=True on the CPU too, in float32 and float64.
    """

    low: bool = False
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
    optim.SGD: Proved(),
}
DEPENDING: dict[type[optim.Optimizer], str] = {
    optim.Adafactor: "its means run over rows and whole tensors",
    optim.LBFGS: "its dot products run over the whole model",
}


def judge(
    kind: type[optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: str
) -> str | None:
    """Whether an optimizer gives an element of a sharded parameter the same bits in any shard.

    Args:
        kind: its class; one that is derived from a class of the table is in no row.
        options: of the parameter's group.
        dtype: of the parameter.
        device: its type.

    Returns:
        None where it is proved, else a sentence that says what is not.

    Raises:
        ValueError: it is known that it does not; names the way out.
    """
    row, is_fused = PROVED.get(kind), bool(options.get("fused"))
    name = f"exact=True: {kind.__name__}{'(fused=True)' * is_fused} steps sharded parameters"
    reason = DEPENDING.get(kind)
    if reason is None and (row is None or dtype.is_complex or (is_fused and device != "cpu")):
        return (
            f"{name} of {dtype}, and is not proved to give an element the same bits where its "
            "shard ends elsewhere, as shards do on another number of ranks: one that treats each "
            "element by itself does, one with norms, rows or blocks of a tensor does not, so use "
            "DistributedDataParallel for it"
        )
    if row is not None and dtype.itemsize == 2 and not row.low:
        reason = (
            f"its kernel rounds elements of {dtype} at the end of a shard in another way: keep "
            "them in float32, with fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            f"{dtype}, reduce_dtype=torch.float32))"
        )
    elif row is not None and is_fused and not (row.fused and dtype.itemsize > 2):
        reason = (
            "its kernel rounds the elements at the end of a shard in another way: build it with "
            "foreach=True or foreach=False"
        )
    if reason is not None:
        raise ValueError(f"{name}, and {reason}; or use AdamW, or DistributedDataParallel")
    return None


def judge_optimizer(optimizer: optim.Optimizer) -> Iterator[str]:
    """What is not proved of an optimizer's sharded parameters; ValueError as `judge`."""
    for group in optimizer.param_groups:
        kinds = {
            (parameter.dtype, parameter.device.type)
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
            and any(isinstance(place, Shard) for place in parameter.placements)
        }
        for dtype, device in sorted(kinds, key=str):
            if note := judge(type(optimizer), group, dtype, device):
                yield note
