"""The extra state of modules, as a run saves and restores it: values and tensors, by `to_json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from anyrank.files.json_codec import from_json, to_json
from anyrank.files.listing import TensorFill
from anyrank.models.dtensors import as_sharded
from anyrank.runs.state.part_types import PartMatch, PartSource, PartState, hold_to_save, in_line


def save_extra_states(
    part: str, owners: Sequence[tuple[str, nn.Module]], saved: PartState
) -> dict[str, Any]:
    """Save the extra state of modules, by name, for the record of their part; add its tensors to
    `saved`.
    """
    put = partial(_put, saved)
    return {
        name: to_json(module.get_extra_state(), f"{part}@extra.{name}", put)
        for name, module in owners
    }


def _put(saved: PartState, where: str, tensor: torch.Tensor) -> Any:
    sharded = hold_to_save(where, tensor.detach())
    sharded.may_differ = sharded.layout is None  # nothing keeps it the same on every rank
    saved.tensors.append(sharded)
    return {"~whole": where}


def match_extra_states(
    part: str,
    modules: Mapping[str, nn.Module],
    saved: Mapping[str, Any],
    source: PartSource,
    matched: PartMatch,
) -> list[tuple[nn.Module, Any]]:
    """Pair each module with its saved extra state; add fills and problems to `matched`."""

    def take(entry: Any) -> torch.Tensor:
        stored = source.listing.tensors[entry["~whole"]]
        memory = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        sharded = as_sharded(stored.name, memory)
        matched.fills.append(TensorFill(sharded, stored, sharded.tensor, source.listing))
        return sharded.tensor

    for title, names in (
        ("extra state that is missing from the checkpoint", modules.keys() - saved.keys()),
        ("extra state of modules that are not in the model", saved.keys() - modules.keys()),
    ):
        if names:
            matched.problems.append(in_line(f"{part}: {title}", sorted(names)))
    return [(modules[name], from_json(saved[name], take)) for name in saved if name in modules]
