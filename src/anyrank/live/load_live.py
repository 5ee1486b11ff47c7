"""A load from a dict of sharded tensors. It is a sync, because no rank has all bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from anyrank.files.listing import EXTRA_STATE
from anyrank.live.agreement import SyncCall, agree_plan
from anyrank.live.live import execute_sync
from anyrank.loading.report import FillReport, LoadReport
from anyrank.models.memory_meter import Meter
from anyrank.models.options import LoadOptions
from anyrank.models.own_code import NOT_RUN, OwnCode
from anyrank.sources.readers.memory import describe_unread
from anyrank.world.ranks import Ranks


def load_live(
    model: nn.Module, source: object, options: LoadOptions, ranks: Ranks, meter: Meter
) -> LoadReport:
    """Load from tensors that are sharded over several ranks. Collective.

    Raises:
        LoadError: as for `anyrank.load`.
    """
    entries: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    # Arrays are included, so that they raise an error on every rank: they may be weights.
    tensors = {
        key: value
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) or describe_unread(key, value)
        if key.rpartition(".")[2] != EXTRA_STATE
    }
    layout = (options.layout, None)  # for the model's tensors; sharded tensors know their own
    call = SyncCall(model, tensors, options, layout, atomic=False)
    agreed = agree_plan(call, ranks)
    done = execute_sync(call, agreed, ranks, meter)
    own_code = OwnCode(agreed.dst.tree.modules)
    skipped = [f"{key}: not a tensor of the model" for key in entries if key not in tensors]
    shared: dict[str, Any] = {field.name: getattr(done, field.name) for field in fields(FillReport)}
    return LoadReport(
        **shared,
        own_code_not_run=dict.fromkeys(own_code.modules, NOT_RUN),
        format="sharded tensors in memory",
        strategy="sync",
        reason="no rank has all bytes of the source",
        skipped=sorted(ranks.reduce("collecting skipped keys", {*skipped}, operator.or_)),
        bytes_read=done.bytes_copied,
    )
