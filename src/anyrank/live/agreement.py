"""The plan of a sync: agreed by all ranks, and kept for the next call of the same object.

The message that compares the arguments also says whether the previous plan is still valid: each
rank checks its own ends, and sends the plan's key if nothing has changed. The key is a digest of
the messages of all ranks when the plan was made. If a rank sends a different key, or none, all
ranks make a new plan: one rank of each layout describes it to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from anyrank.checks import check_bool
from anyrank.errors import LoadError, WrongType
from anyrank.live.ends import (
    End,
    EndDescription,
    accelerator_of,
    check_values,
    describe,
    find_end,
)
from anyrank.live.live_flows import EndsSummary, HeldEnd, Planner, SyncPlan, renamed_by
from anyrank.models.dialects.layouts.given import (
    GivenLayout,
    check_layout,
    join_parts,
    warn_about_unused_layout,
)
from anyrank.models.options import LoadOptions
from anyrank.world.alike import digest_of
from anyrank.world.arguments import compare_and_reduce
from anyrank.world.ranks import Ranks

Layouts: TypeAlias = "GivenLayout | tuple[GivenLayout, ...]"  # one for both ends, or one for each
COMPARED = ("missing", "unexpected", "cast", "rename", "verify", "merge")


@dataclass(frozen=True)
class SyncCall:
    """A caller's request; see `anyrank.sync`."""

    dst: nn.Module | Mapping[str, torch.Tensor] | None
    src: nn.Module | Mapping[str, torch.Tensor] | None
    options: LoadOptions
    layout: Layouts
    atomic: bool

    def check(self) -> None:
        """Check the arguments that are wrong in themselves.

        Raises:
            ValueError, TypeError: an argument is wrong; the error names it.
        """
        for name, end in (("dst", self.dst), ("src", self.src)):
            _check_end(name, end)
        check_bool(atomic=self.atomic)
        self.options.check()
        if isinstance(self.layout, tuple) and len(self.layout) != 2:
            raise WrongType(
                f"layout=: expected one layout, or a pair for dst and src, got a tuple of "
                f"{len(self.layout)}"
            )
        if any(layout is not None for layout in self.layouts):
            for layout in self.layouts:
                check_layout(layout)

    @property
    def layouts(self) -> Sequence[GivenLayout]:
        """The layouts for dst and for src."""
        return self.layout if isinstance(self.layout, tuple) else (self.layout, self.layout)


@dataclass(frozen=True)
class KeptPlan:
    """A plan, and the conditions under which it is valid; it holds no tensors.

    Attributes:
        key: key of the plan; the same on every rank.
        where: the ranks, and the machine of each.
        plan: plan of this rank.
        described: descriptions of dst and src for other ranks.
        accelerator: accelerator of this rank.
    """

    key: str
    where: tuple[tuple[int, ...], tuple[int, ...]]
    plan: SyncPlan
    described: tuple[EndDescription, EndDescription]
    accelerator: str


@dataclass(frozen=True)
class AgreedSync:
    """The agreement of all ranks before the first byte moves.

    Attributes:
        kept: the plan, for the next call.
        dst, src: the ends on this rank.
        is_planned: whether this call made the plan.
        seed: the first rank's torch seed.
    """

    kept: KeptPlan
    dst: End
    src: End
    is_planned: bool
    seed: int

    @property
    def plan(self) -> SyncPlan:
        """This rank's part of the plan."""
        return self.kept.plan


@dataclass(frozen=True)
class _CallMessage:
    """The message with a rank's arguments to the other ranks.

    Attributes:
        key: key of the plan that is valid for this rank and all ranks whose messages were joined;
            empty if there is none.
        seed: the first rank's torch seed.
        has_layout: whether any of these ranks has a `layout=`.
    """

    key: str
    seed: int
    has_layout: bool

    def join(self, others: _CallMessage) -> _CallMessage:
        """Merge the messages of ranks."""
        key = self.key if self.key == others.key else ""
        return _CallMessage(key, self.seed, self.has_layout or others.has_layout)


def agree_plan(call: SyncCall, ranks: Ranks, kept: KeptPlan | None = None) -> AgreedSync:
    """Agree on the plan that all ranks follow. Collective; changes nothing.

    Args:
        call: request of this rank.
        ranks: ranks of the call.
        kept: plan of the previous call, if it exists.

    Raises:
        LoadError: the ends do not match, on any rank, or arguments differ; on every rank.
        ValueError, TypeError: an argument is wrong in itself; on every rank.
    """
    where = ranks.ranks, ranks.nodes
    own_ends: list[End] = []  # dst and src
    accelerators: list[str] = []

    def tell() -> _CallMessage:
        own_ends.extend(_find_ends(call, ranks, kept))
        dst, src = own_ends
        check_values(src)
        accelerators.append(accelerator_of([*dst.tensors, *src.tensors]))
        key = ""
        if kept is not None and kept.accelerator == accelerators[0]:
            key = kept.key if _serves(kept, where, (dst, src), call.options) else ""
        has_layout = any(layout is not None for layout in call.layouts)
        return _CallMessage(key, torch.initial_seed(), has_layout)

    arguments = {name: getattr(call.options, name) for name in COMPARED} | {"atomic": call.atomic}
    message = compare_and_reduce(
        ranks, "sync", arguments, LoadError, call.check, tell, _CallMessage.join
    )
    dst, src = own_ends
    if kept is not None and message.key == kept.key:
        return AgreedSync(kept, dst, src, False, message.seed)
    if message.has_layout:
        dst, src = _join(dst, src, ranks, merge=call.options.merge)
    # Once per plan: each rank computes what it sends to whom, and ranks may have different ends.
    ends = ranks.gather("describing both ends", _summary(dst, src, accelerators[0]))
    plan = Planner(ends, ranks, call.options).plan(dst, src)
    if any(layout is not None for layout in call.layouts):
        _warn_about_unused(call, dst, src)
    key = digest_of([where, ends])
    new_plan = KeptPlan(key, where, plan, (dst.described, src.described), accelerators[0])
    return AgreedSync(new_plan, dst, src, True, message.seed)


def _summary(dst: End, src: End, accelerator: str) -> EndsSummary:
    """Summarize both ends for the other ranks."""
    return EndsSummary(
        src=HeldEnd(src.digest, src.described.coordinates),
        dst=HeldEnd(dst.digest, dst.described.coordinates),
        accelerator=accelerator,
    )


def _join(dst: End, src: End, ranks: Ranks, *, merge: bool) -> tuple[End, End]:
    """Set the global shapes of both ends, which all ranks' parts add up to. Collective.

    Raises:
        LoadError: as for `join_parts`.
    """
    join_parts((dst.tensors, src.tensors), ranks)
    return (
        replace(dst, described=describe(dst.tree, merge=False)),
        replace(src, described=describe(src.tree, merge=merge)),
    )


def _find_ends(call: SyncCall, ranks: Ranks, kept: KeptPlan | None) -> tuple[End, End]:
    """Find both ends on this rank; digests that the kept plan knows are not computed again.

    Raises:
        LoadError, ValueError, TypeError: as for `find_end`.
    """
    known = kept.described if kept is not None else (None, None)
    dst_layout, src_layout = call.layouts
    merge = call.options.merge
    dst = find_end(call.dst, ranks, layout=dst_layout, known=known[0])
    return dst, find_end(call.src, ranks, layout=src_layout, merge=merge, known=known[1])


def _warn_about_unused(call: SyncCall, dst: End, src: End) -> None:
    """Warn about names in `layout=` that no tensor of its end, or of both ends, has."""
    if isinstance(call.layout, tuple):
        for layout, end in zip(call.layout, (dst, src), strict=True):
            warn_about_unused_layout(layout, end.tensors)
    else:
        warn_about_unused_layout(call.layout, dst.tensors, src.tensors)


def _serves(kept: KeptPlan, where: object, ends: tuple[End, End], options: LoadOptions) -> bool:
    """Return True if a kept plan is still valid for this rank's ends."""
    return (
        kept.where == where
        and kept.plan.route.channel is not None  # its first call has reached the move
        and kept.described == tuple(end.described for end in ends)
        and kept.plan.renamed == renamed_by(kept.plan.renamed, options)
    )


def _check_end(name: str, end: Any) -> None:
    """Check that an argument is a model, a dict of tensors or None.

    Raises:
        TypeError: it is not; the error names the argument.
    """
    if end is None or isinstance(end, nn.Module):
        return
    if not isinstance(end, Mapping):
        raise TypeError(
            f"{name}=: expected a torch.nn.Module, a dict of tensors or None, got "
            f"{type(end).__name__}"
        )
    unnamed = [key for key in end if not isinstance(key, str)]
    if unnamed:
        raise TypeError(
            f"{name}=: expected a dict from names (str) to tensors, got the key {unnamed[0]!r}, "
            f"which is of type {type(unnamed[0]).__name__}"
        )
    wrong = [key for key, value in end.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"{name}=: expected a dict of tensors, but the value of {wrong[0]!r} is of type "
            f"{type(end[wrong[0]]).__name__}"
        )
