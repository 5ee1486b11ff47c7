"""`anyrank.plan`: the reads, messages and memory of a load, without moving payload.

It is `load` up to the agreement, on the existing ranks. For a different number of ranks, `forecast`
computes the largest share in closed form.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import nn

from anyrank.loading.agreed_plan import AgreedPlan, plan_load
from anyrank.loading.headers import SourceInfo, header_reader, look_at_source
from anyrank.loading.report import MIB
from anyrank.models.dialects.layouts.given import GivenLayout
from anyrank.models.dialects.registry import values_without_model
from anyrank.models.dialects.transformers.dequantize import check_method
from anyrank.models.frozen_parts import frozen_sources
from anyrank.models.options import LoadOptions
from anyrank.models.tensors import in_state_dict
from anyrank.settings import BUFFER_BYTES
from anyrank.sources.source import Source, check_source, list_headers
from anyrank.tensors.names import Rename
from anyrank.wording import count
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a load. Lists have one entry per rank, in the group's order.

    Example::

        weights = {"weight": torch.eye(2), "bias": torch.ones(2)}
        plan = anyrank.plan(torch.nn.Linear(2, 2), weights)
        assert plan.read_bytes == [24]
        print(plan)

    Attributes:
        strategy, reason: who reads, and why.
        world_size: number of ranks.
        model_bytes: size of the whole model, in its own dtypes.
        source_bytes: size of the tensors wanted from the source.
        share_bytes: bytes that each rank holds afterwards.
        read_bytes: bytes that each rank reads from storage, excluding gaps that are read with them.
        sent_bytes: bytes that each rank sends to other ranks.
        peak_bytes: peak memory of each rank: its share and the staging buffer.
        format: format of the source.
        missing, unexpected: names, as in `LoadReport`.
    """

    strategy: str
    reason: str
    world_size: int
    model_bytes: int
    source_bytes: int
    share_bytes: list[int]
    read_bytes: list[int]
    sent_bytes: list[int]
    peak_bytes: list[int]
    format: str = ""
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [
            ("share", self.share_bytes),
            ("read", self.read_bytes),
            ("sent", self.sent_bytes),
            ("peak", self.peak_bytes),
        ]
        lines = [
            f"{count(self.world_size, 'rank')}, {self.model_bytes / MIB:.1f} MiB model, "
            f"{self.source_bytes / MIB:.1f} MiB source ({self.format})",
            f"  strategy {self.strategy}: {self.reason}",
        ]
        lines += [
            f"  {title:<6} {min(values) / MIB:.1f} to {max(values) / MIB:.1f} MiB per rank, "
            f"{sum(values) / MIB:.1f} MiB in total"
            for title, values in rows
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Forecast:
    """The share of a source's tensors per rank, for any number of hypothetical ranks.

    Attributes:
        format: format of the source.
        source_bytes: size of its tensors.
        share_bytes: share of the rank that holds the most.
        peak_bytes: peak memory of that rank while it loads: its share and the buffer.
    """

    format: str
    source_bytes: int
    share_bytes: int
    peak_bytes: int


def plan(
    model: nn.Module,
    source: Source | None,
    *,
    missing: Literal["error", "init", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    cast: Literal["float", "any"] = "float",
    rename: Rename = None,
    layout: GivenLayout = None,
    strategy: Literal["auto", "own", "stripe", "scatter"] = "auto",
    buffer_bytes: int | None = None,
    process_group: Group = None,
    progress: object = None,
    verify: bool = False,
) -> LoadPlan:
    """Plan a load without moving any weights: the checks and errors of `load`; changes nothing.

    Collective: every rank of the group must call it. The plan is for this model on these ranks.
    `anyrank plan` computes the share of each rank for ranks that do not exist yet.

    Example::

        with anyrank.meta():
            model = torch.nn.Linear(1024, 1024, bias=False)
        weights = {"weight": torch.zeros(1024, 1024)}
        plan = anyrank.plan(model, weights)
        assert plan.share_bytes == [1024 * 1024 * 4]
        print(plan)

    Args:
        model, source: as for `load`.
        missing, unexpected, cast, rename, layout, strategy, buffer_bytes, process_group: as for
            `load`.
        progress, verify: ignored, because no payload moves; accepted so that the arguments of a
            load can be passed.

    Raises:
        LoadError: if `load` would raise it.
        ValueError, TypeError: an argument that is wrong in itself, as for `load`.
    """
    options = LoadOptions(
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        rename=rename,
        strategy=strategy,
        buffer_bytes=buffer_bytes,
        verify=verify,
        layout=layout,
    )
    with open_ranks(process_group, "plan()", may_be_alone=True) as ranks:
        headers = header_reader(source, partial(frozen_sources, model), ranks)
        tell = partial(look_at_source, source, ranks, headers)
        info = options.agree(ranks, "plan", model, source, tell, SourceInfo.join)
        return _plan_of(plan_load(model, source, ranks, options, info, headers), ranks)


def forecast(source: Source, shards: int, dtype: torch.dtype | None = None) -> Forecast:
    """Return the largest share of a source's tensors, each split along dim 0 as FSDP2 does.

    Args:
        source: as for `load`.
        shards: the number of shards.
        dtype: dtype of the model's floating-point tensors; default: that of the source.

    Raises:
        LoadError, UnsafeFile, ValueError, TypeError: as for `load`.
    """
    check_source(source)
    listing = list_headers(source)
    if dtype is not None:
        listing = values_without_model(listing)
        check_method(listing)
    share = read = 0
    for tensor in listing.tensors.values():
        rows, *others = tensor.shape or (1,)
        numel = math.ceil(rows / shards) * math.prod(others)
        target = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        share += numel * target.itemsize
        read += listing.stored_bytes(tensor, numel)
    return Forecast(
        format=listing.format,
        source_bytes=sum(listing.stored_bytes(t, t.numel) for t in listing.tensors.values()),
        share_bytes=share,
        peak_bytes=share + min(BUFFER_BYTES.get(), read),
    )


def _plan_of(plan: AgreedPlan, ranks: Ranks) -> LoadPlan:
    """Return the plan in bytes: each rank counts its own. Collective."""
    match, listing = plan.match, plan.match.listing
    # A gather, because a plan shows three numbers of each rank, and is the same on every rank.
    by_rank = ranks.run_and_gather("counting bytes", lambda: (None, _own_bytes(plan, ranks.rank)))[
        1
    ]
    share, read, sent = ([*column] for column in zip(*by_rank, strict=True))
    return LoadPlan(
        strategy=plan.reading.strategy,
        reason=plan.reading.reason,
        world_size=ranks.size,
        model_bytes=sum(
            math.prod(t.shape) * t.dtype.itemsize for t in in_state_dict(match.tensors)
        ),
        source_bytes=sum(listing.stored_bytes(t, t.numel) for t in match.stored.values()),
        share_bytes=share,
        read_bytes=read,
        sent_bytes=sent,
        peak_bytes=[size + min(plan.buffer_bytes, max(moves)) for size, *moves in by_rank],
        format=listing.format,
        missing=match.missing,
        unexpected=match.unexpected,
    )


def _own_bytes(plan: AgreedPlan, rank: int) -> tuple[int, int, int]:
    """Return the bytes that a rank would hold, read and send."""
    match, listing = plan.match, plan.match.listing
    share = sum(t.local_numel * t.dtype.itemsize for t in in_state_dict(match.tensors))
    flows = plan.reading.flows
    if flows is None:
        wanted = ((stored, match.tensors[index].local_numel) for index, stored in match.wanted)
        return share, sum(listing.stored_bytes(stored, numel) for stored, numel in wanted), 0
    read = sent = 0
    for flow in itertools.chain.from_iterable(flows.rounds(rank)):
        for block in flow.reads.values():
            read += listing.stored_bytes(block.stored, block.box.numel)
        others = (t for t in flow.transfers if t.sender == rank != t.receiver)
        sent += sum(transfer.box.numel for transfer in others) * flow.wire_dtype.itemsize
    return share, read, sent
