"""`anyrank.plan`: what a load would read, send and hold, without moving payload, for any number of
ranks.

With processes it is `load` up to the agreement. Without, it takes a mesh that does not exist yet:
shares of ceil(rows / ranks) rows follow in closed form, so 16,384 ranks cost no more than one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from anyrank.checks import check_choice, check_int
from anyrank.files.checksums import checked_bytes
from anyrank.files.listing import Listing
from anyrank.files.quantised import check_method, dequantised
from anyrank.filling.flows import own_numel
from anyrank.filling.plan_load import (
    AgreedPlan,
    SourceInfo,
    header_reader,
    look_at_source,
    plan_load,
)
from anyrank.filling.report import LoadPlan
from anyrank.filling.strategy import Decision, caches_of, decide
from anyrank.formats.sources import Source, check_source, list_source
from anyrank.model.given_layouts import GivenLayout
from anyrank.model.match import ModelMatch
from anyrank.model.options import STRATEGIES, LoadOptions
from anyrank.model.tensors import in_state_dict
from anyrank.settings import BUFFER_BYTES
from anyrank.tensors.names import Rename
from anyrank.world.group import Group, check_group
from anyrank.world.ranks import Ranks, one_process, open_ranks

# What a node is assumed to do when nothing is measured; only the prediction depends on them.
READ_BYTES_PER_SEC = 2 << 30  # of one node, from storage
SEND_BYTES_PER_SEC = 1 << 30  # of one rank, over gloo
START_SEC = 0.1  # headers and agreement


@dataclass(frozen=True)
class _Tensor:
    """What the closed form needs of one tensor; `stored_bytes` are of all of it."""

    name: str
    shape: tuple[int, ...]
    stored_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Bytes:
    """What a load moves: by rank, and of the whole model and source."""

    share: list[int]
    read: list[int]
    sent: list[int]
    model: int
    source: int


def plan(
    model: nn.Module,
    source: Source | None,
    *,
    world_size: int | None = None,
    mesh: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
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
    """Plan a load without payload: the same checks and the same errors as `load`, nothing changed.

    Without `world_size` and `mesh` every rank of the group calls it, and the plan is of this model
    on these ranks. With one of them it is called by one process alone, for ranks that do not exist
    yet: each tensor is then cut along its first dim over the last axis of the mesh and held alike
    along the axes before it (FSDP2, HSDP).

    Example::

        with anyrank.meta():
            model = torch.nn.Linear(1024, 1024, bias=False)
        weights = {"weight": torch.zeros(1024, 1024)}
        plan = anyrank.plan(model, weights, world_size=8)
        assert plan.share_bytes == [1024 * 1024 * 4 // 8] * 8
        print(plan)

    Args:
        model: as for `load`; for ranks that do not exist yet, plain, for instance on meta.
        source: as for `load`.
        world_size: ranks in all; a mesh of one axis.
        mesh: sizes of the axes, the sharded one last: (2, 8) is HSDP with 2 replicas of 8 shards.
        ranks_per_node: for `world_size` and `mesh`; default: at most 8.
        missing, unexpected, cast, rename, layout, strategy, buffer_bytes, process_group: as for
            `load`.
        progress: ignored, as no payload moves; accepted so that the arguments of a load can be
            passed on.
        verify: count the bytes that a comparison with the source's checksums would read as well.

    Raises:
        LoadError: as `load` would.
        ValueError, TypeError: an argument that is wrong in itself, as for `load`; or a mesh that
            does not multiply to `world_size`.
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
    if world_size is None and mesh is None:
        with open_ranks(process_group, "plan()") as ranks:
            headers = header_reader(model, source, ranks)
            tell = partial(look_at_source, source, ranks, headers)
            sources: list[SourceInfo] = options.agree(ranks, "plan", model, source, tell)
            agreed = plan_load(model, source, ranks, options, sources, headers)
            forecast = _plan_of(agreed, ranks)
    else:
        sizes = _mesh_sizes(world_size, mesh, ranks_per_node)
        check_group(process_group)
        options.check_call(model, source)
        alone = one_process()
        headers = header_reader(model, source, alone)
        sources = [look_at_source(source, alone, headers)]
        agreed = plan_load(model, source, alone, options, sources, headers)
        listing, tensors = agreed.match.listing, _dtypes(agreed.match)
        forecast = _closed_form(
            tensors, sizes, ranks_per_node, strategy, agreed.buffer_bytes, listing
        )
    match = agreed.match
    forecast = replace(forecast, missing=match.missing, unexpected=match.unexpected)
    return _with_check(forecast, match.listing) if verify else forecast


def _dtypes(match: ModelMatch) -> list[_Tensor]:
    loadable = [(i, t) for i, t in enumerate(match.tensors) if t.kind != "derived"]
    return [
        _Tensor(
            t.name,
            t.shape,
            match.listing.stored_bytes(stored, stored.numel)
            if (stored := match.stored.get(i))
            else math.prod(t.shape) * t.dtype.itemsize,
            t.dtype,
        )
        for i, t in loadable
    ]


def _with_check(forecast: LoadPlan, listing: Listing) -> LoadPlan:
    """The plan of a load that compares the files with their checksums first, each byte once."""
    checked = checked_bytes(listing)
    seconds = forecast.seconds + checked / forecast.nodes / READ_BYTES_PER_SEC
    by_rank = checked // forecast.world_size
    return replace(
        forecast,
        read_bytes=[nbytes + by_rank for nbytes in forecast.read_bytes],
        node_read_bytes=[nbytes + checked // forecast.nodes for nbytes in forecast.node_read_bytes],
        seconds=seconds,
    )


def plan_source(
    source: Source,
    *,
    world_size: int,
    mesh: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    dtype: torch.dtype | None = None,
    strategy: str = "auto",
) -> LoadPlan:
    """As `plan` with `world_size`, for a source alone: its tensors stand for the model's.

    Args:
        dtype: of the model's floating tensors; default: the source's.

    Raises:
        LoadError, UnsafeFile, ValueError, TypeError: as `plan`.
    """
    sizes = _mesh_sizes(world_size, mesh, ranks_per_node)
    check_choice("strategy", strategy, STRATEGIES)
    check_source(source)
    listing = list_source(source)
    if dtype is not None:
        check_method(listing)
        listing = dequantised(listing, {})
    tensors = [
        _Tensor(
            key,
            t.shape,
            listing.stored_bytes(t, t.numel),
            dtype if dtype is not None and t.dtype.is_floating_point else t.dtype,
        )
        for key, t in listing.tensors.items()
    ]
    return _closed_form(tensors, sizes, ranks_per_node, strategy, BUFFER_BYTES.get(), listing)


def _mesh_sizes(
    world_size: int | None, mesh: Sequence[int] | None, ranks_per_node: int | None
) -> tuple[int, ...]:
    """Sizes of the mesh's axes.

    Raises:
        ValueError, TypeError: an argument that is not a positive whole number, or a mesh that does
            not multiply to `world_size`.
    """
    value: Any = mesh  # whatever it is
    if value is not None and not (isinstance(value, Sequence) and value):
        raise TypeError(f"mesh={value!r}: give the sizes of its axes, as (2, 4)")
    sizes = tuple(mesh) if mesh is not None else (1 if world_size is None else world_size,)
    for name, values in (
        ("world_size", [world_size]),
        ("mesh", sizes),
        ("ranks_per_node", [ranks_per_node]),
    ):
        for value in values:
            if value is not None:
                check_int(name, value, 1)
    world = math.prod(sizes)
    if world_size is not None and world != world_size:
        shape = "x".join(map(str, sizes))
        raise ValueError(f"a mesh of {shape} has {world} ranks, not {world_size}")
    return sizes


def _closed_form(
    tensors: Sequence[_Tensor],
    sizes: tuple[int, ...],
    ranks_per_node: int | None,
    strategy: str,
    buffer: int,
    listing: Listing,
) -> LoadPlan:
    """Bytes by rank for first-dim shards over the last mesh axis; visits shards, not ranks."""
    world = math.prod(sizes)
    per_node = min(ranks_per_node or 8, world)
    nodes = [rank // per_node for rank in range(world)]
    shards, copies = sizes[-1], world // sizes[-1]
    share = [0] * shards
    wanted = [0] * shards
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        row = math.prod(tensor.shape[1:])
        rows_of_shard = -(-rows // shards) if tensor.shape else 1
        for shard in range(shards if tensor.shape else 1):
            numel = max(0, min(rows_of_shard, rows - shard * rows_of_shard)) * row
            if not numel:
                break
            share[shard] += numel * tensor.dtype.itemsize
            wanted[shard] += numel * tensor.stored_bytes // math.prod(tensor.shape)
    caches = caches_of(range(world), nodes, listing)
    repeated = sum(wanted) if copies > 1 and len(set(caches)) > 1 else 0
    decision = decide(strategy, range(world), caches, [True] * world, repeated)
    by_rank = [rank % shards for rank in range(world)]
    share_bytes = [share[s] for s in by_rank]
    read = {
        "own": [wanted[s] for s in by_rank],
        "stripe": [wanted[s] // copies for s in by_rank],
        "scatter": [sum(wanted), *[0] * (world - 1)],
    }[decision.name]
    sent = {
        "own": [0] * world,
        "stripe": [wanted[s] // copies * (copies - 1) for s in by_rank],
        "scatter": [sum(wanted) * copies - wanted[0], *[0] * (world - 1)],
    }[decision.name]
    moved = _Bytes(share_bytes, read, sent, sum(share), sum(wanted))
    return _forecast(moved, decision, nodes, buffer, listing)


def _plan_of(plan: AgreedPlan, ranks: Ranks) -> LoadPlan:
    """The forecast of an agreed plan: each rank counts what it would do. All ranks."""
    match, listing = plan.match, plan.match.listing
    loadable = in_state_dict(match.tensors)
    by_rank = ranks.together("counting bytes", lambda: _own_bytes(plan, ranks.rank))
    share, read, sent = ([*column] for column in zip(*by_rank, strict=True))
    moved = _Bytes(
        share=share,
        read=read,
        sent=sent,
        model=sum(math.prod(target.shape) * target.dtype.itemsize for target in loadable),
        source=sum(listing.stored_bytes(t, t.numel) for t in match.stored.values()),
    )
    return _forecast(moved, plan.decision, ranks.nodes, plan.buffer_bytes, listing)


def _own_bytes(plan: AgreedPlan, rank: int) -> tuple[int, int, int]:
    """What a rank would hold, read and send."""
    match, listing = plan.match, plan.match.listing
    share = sum(t.local_numel * t.dtype.itemsize for t in in_state_dict(match.tensors))
    read = sent = 0
    if plan.flows is None:
        for index, stored in match.filled:
            numel = own_numel(stored, match.tensors[index].pieces, listing)
            read += listing.stored_bytes(stored, numel)
        return share, read, 0
    for flow in itertools.chain.from_iterable(plan.flows.rounds(rank)):
        for block in flow.reads.values():
            read += listing.stored_bytes(block.stored, block.box.numel)
        others = (t for t in flow.transfers if t.sender == rank != t.receiver)
        sent += sum(transfer.box.numel for transfer in others) * flow.wire_dtype.itemsize
    return share, read, sent


def _forecast(
    moved: _Bytes, decision: Decision, nodes: Sequence[int], buffer: int, listing: Listing
) -> LoadPlan:
    """The plan: memory and time, from the bytes."""
    staged = [min(buffer, max(pair)) for pair in zip(moved.read, moved.sent, strict=True)]
    peak = [sum(pair) for pair in zip(moved.share, staged, strict=True)]
    node_read, node_peak = [0] * (max(nodes) + 1), [0] * (max(nodes) + 1)
    caches = caches_of(range(len(nodes)), nodes, listing)
    by_cache: dict[tuple[int, int], int] = {}
    for node, cache, nbytes, peak_bytes in zip(nodes, caches, moved.read, peak, strict=True):
        by_cache[node, cache] = by_cache.get((node, cache), 0) + nbytes
        node_peak[node] += peak_bytes
    for (node, _), nbytes in by_cache.items():
        node_read[node] += min(nbytes, moved.source)  # the rest is in the cache
    seconds = START_SEC + max(node_read) / READ_BYTES_PER_SEC
    return LoadPlan(
        strategy=decision.name,
        reason=decision.reason,
        world_size=len(nodes),
        nodes=len(node_read),
        model_bytes=moved.model,
        source_bytes=moved.source,
        share_bytes=moved.share,
        read_bytes=moved.read,
        sent_bytes=moved.sent,
        peak_bytes=peak,
        node_read_bytes=node_read,
        node_peak_bytes=node_peak,
        seconds=seconds + max(moved.sent) / SEND_BYTES_PER_SEC,
        format=listing.format,
    )
