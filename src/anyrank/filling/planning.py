"""The plan of a sync: agreed by all ranks, and kept for the next call of the same object.

Whether the plan of the call before still serves is told in the message that compares the arguments:
each rank looks at its own ends, and gives the plan's token if nothing has changed. Where one rank
has another token, or none, all plan anew: one rank of each layout describes it to the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anyrank.checks import check_bool
from anyrank.errors import LoadError
from anyrank.filling.ends import Described, End, Look, check_values, join_ends
from anyrank.filling.live_flows import EndsSummary, Planner, SyncPlan, renamed_by
from anyrank.model.given_layouts import JoinedLayouts, RankLayouts, join_layouts, read_layouts
from anyrank.model.options import LoadOptions
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks

COMPARED = ("missing", "unexpected", "cast", "rename", "verify", "merge")


@dataclass(frozen=True)
class SyncCall:
    """What a caller asked for; see `anyrank.sync`."""

    dst: nn.Module | Mapping[str, torch.Tensor] | None
    src: nn.Module | Mapping[str, torch.Tensor] | None
    options: LoadOptions
    atomic: bool

    def check(self) -> None:
        """Refuse arguments that are wrong in themselves.

        Raises:
            ValueError, TypeError: names the argument.
        """
        for name, end in (("dst", self.dst), ("src", self.src)):
            _check_end(name, end)
        check_bool(atomic=self.atomic)
        self.options.check()


@dataclass(frozen=True)
class KeptPlan:
    """A plan, and all that it was made for; it holds no tensors.

    Attributes:
        token: that the ranks gave it.
        where: the ranks, and the machine of each.
        plan: this rank's part.
        described: dst and src, for other ranks.
        layouts: what `layout=` said of the tensors of both.
        joined: what these are parts of.
    """

    token: str
    where: tuple[tuple[int, ...], tuple[int, ...]]
    plan: SyncPlan
    described: tuple[Described, Described]
    layouts: RankLayouts
    joined: JoinedLayouts


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on before the first byte.

    Attributes:
        kept: the plan, for the next call.
        dst, src: as they are on this rank.
        is_planned: whether the plan was made now.
        seed: the first rank's torch seed.
    """

    kept: KeptPlan
    dst: End
    src: End
    is_planned: bool
    seed: int

    @property
    def plan(self) -> SyncPlan:
        """This rank's part of it."""
        return self.kept.plan


@dataclass(frozen=True)
class _CallMessage:
    """What a rank tells the others with its arguments.

    Attributes:
        token: of the plan that serves this rank; empty if there is none.
        new: a token for the plan that is made if they differ; the first rank's counts.
        has_layout: whether it was given one.
        seed: its torch seed.
        ends: as they are without `layout=`; None where something is wrong with them.
    """

    token: str
    new: str
    has_layout: bool
    seed: int
    ends: EndsSummary | None


def agree_plan(call: SyncCall, ranks: Ranks, kept: KeptPlan | None = None) -> Agreement:
    """The plan that all ranks follow. All ranks; nothing is changed.

    Args:
        call: what this rank was asked for.
        ranks: of the call.
        kept: the plan of the call before, if there is one.

    Raises:
        LoadError: the ends do not fit each other, on any rank, or arguments differ; on all ranks.
        ValueError, TypeError: an argument that is wrong in itself; on all ranks.
    """
    own_ends = _OwnEnds(call, ranks, kept)

    def tell() -> _CallMessage:
        has_layout = call.options.layout is not None
        token = kept.token if own_ends.is_served() and kept is not None else ""
        ends = None if has_layout else own_ends.introduce()
        return _CallMessage(token, uuid.uuid4().hex, has_layout, torch.initial_seed(), ends)

    arguments = {name: getattr(call.options, name) for name in COMPARED} | {"atomic": call.atomic}
    messages: list[_CallMessage] = compare_arguments(
        ranks, "sync", arguments, LoadError, call.check, tell
    )
    first = messages[0]
    if kept is not None and first.token and all(m.token == first.token for m in messages):
        return Agreement(kept, *own_ends.both(), False, first.seed)
    ends = [message.ends for message in messages if message.ends is not None]
    has_layout = any(message.has_layout for message in messages)
    new_plan = own_ends.plan(first.new, ends, has_layout)
    return Agreement(new_plan, *own_ends.both(), True, first.seed)


class _OwnEnds:
    """What this rank has of both ends in one call."""

    def __init__(self, call: SyncCall, ranks: Ranks, kept: KeptPlan | None) -> None:
        self.call, self.ranks, self.kept = call, ranks, kept
        self.where = ranks.ranks, ranks.nodes
        self.problem: Exception | None = None
        self.looks: tuple[Look, Look]
        self.layouts: RankLayouts
        self.joined: JoinedLayouts
        self.ends: tuple[End, End] | None = None

    def is_served(self) -> bool:
        """Look at both ends: whether the kept plan is for them as they are now.

        What goes wrong is raised where all ranks look together.
        """
        try:
            return self._look()
        except Exception as error:
            self.problem = error
            return False

    def introduce(self) -> EndsSummary | None:
        """Both ends for the other ranks, without `layout=`; None if something is wrong."""
        if self.problem is not None:
            return None
        try:
            if self.ends is None:
                self._join(JoinedLayouts(self.layouts.parts, {}))  # of no parts
            return self._summary()
        except Exception as error:
            self.problem = error
            return None

    def _join(self, joined: JoinedLayouts) -> None:
        self.joined = joined
        self.ends = join_ends(self.looks, joined)

    def both(self) -> tuple[End, End]:
        """dst and src, once they are joined."""
        assert self.ends is not None
        return self.ends

    def _summary(self) -> EndsSummary:
        dst, src = self.both()
        check_values(src)
        return EndsSummary(
            src=src.digest,
            src_at=src.described.coordinates,
            dst=dst.digest,
            dst_at=dst.described.coordinates,
        )

    def _look(self) -> bool:
        call, kept = self.call, self.kept
        options = call.options
        self.looks = Look(call.dst), Look(call.src, merge=options.merge)
        ends = {"dst": self.looks[0].tensors, "src": self.looks[1].tensors}
        self.layouts = read_layouts(ends, options.layout, self.ranks.rank)
        if kept is None or (self.where, self.layouts) != (kept.where, kept.layouts):
            return False
        ends = join_ends(self.looks, kept.joined)
        if tuple(end.described for end in ends) != kept.described:
            return False
        if kept.plan.renamed != renamed_by(kept.plan.renamed, options):
            return False  # a function answers differently now
        dst, src = (
            replace(end, described=old) for end, old in zip(ends, kept.described, strict=True)
        )
        self.joined, self.ends = kept.joined, (dst, src)  # the digests are known
        return True

    def plan(self, token: str, ends: Sequence[EndsSummary], has_layout: bool) -> KeptPlan:
        """A new plan. All ranks.

        Args:
            token: of it.
            ends: of the ranks that have introduced theirs.
            has_layout: whether any rank was given one.

        Raises:
            LoadError: as `agree_plan`.
        """
        ranks, what = self.ranks, "looking at both ends"

        def say() -> tuple[None, RankLayouts]:
            if self.problem is not None:
                raise self.problem
            return None, self.layouts

        if has_layout:  # ranks without it take part
            _, by_rank = ranks.run_and_gather("reading layout=", say)
            joined = join_layouts(self.layouts, by_rank, ranks)

            def introduce() -> EndsSummary:
                self._join(joined)
                return self._summary()

            ends = ranks.together(what, introduce)
        elif len(ends) < ranks.size:
            ranks.run(what, say)  # raises
        plan = Planner(ends, ranks, self.call.options).plan(*self.both())
        dst, src = self.both()
        described = dst.described, src.described
        return KeptPlan(token, self.where, plan, described, self.layouts, self.joined)


def _check_end(name: str, end: Any) -> None:
    """Refuse what is neither a model nor a dict of tensors nor None.

    Raises:
        TypeError: names the argument.
    """
    if end is None or isinstance(end, nn.Module):
        return
    if not isinstance(end, Mapping):
        raise TypeError(
            f"{name}= takes a torch.nn.Module, a dict of tensors or None, not {type(end).__name__}"
        )
    unnamed = [key for key in end if not isinstance(key, str)]
    if unnamed:
        raise TypeError(
            f"{name}= has the key {unnamed[0]!r}, a {type(unnamed[0]).__name__}: give a dict from "
            "names (str) to tensors"
        )
    wrong = [key for key, value in end.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"{name}= holds {wrong[0]!r}, a {type(end[wrong[0]]).__name__}: give a dict of tensors"
        )
