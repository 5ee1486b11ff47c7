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
from anyrank.filling.ends import Described, End, check_values, look, with_ties
from anyrank.filling.live_flows import EndsSummary, Planner, SyncPlan
from anyrank.model.given_layouts import lay_out, pair_of
from anyrank.model.options import LoadOptions
from anyrank.world.arguments import same_arguments
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
        for name, given in (("dst", self.dst), ("src", self.src)):
            _check_end(name, given)
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
    """

    token: str
    where: tuple[tuple[int, ...], tuple[int, ...]]
    plan: SyncPlan
    described: tuple[Described, Described]


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
class _Told:
    """What a rank tells the others with its arguments.

    Attributes:
        token: of the plan that serves this rank; empty if there is none.
        new: a token for the plan that is made if they differ; the first rank's counts.
        seed: its torch seed.
        ends: both of them; None where something is wrong with them.
    """

    token: str
    new: str
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
    where = ranks.ranks, ranks.nodes
    ends: list[End] = []
    problems: list[Exception] = []

    def tell() -> _Told:
        """What is wrong with the ends is raised below, where all ranks raise it."""
        token, summary = "", None
        try:
            ends.extend(_look(call, ranks, kept))
            if kept is not None and kept.where == where and _is_served(ends, kept):
                token = kept.token
            summary = _summary(*ends)
        except Exception as error:
            problems.append(error)
        return _Told(token, uuid.uuid4().hex, torch.initial_seed(), summary)

    given = {name: getattr(call.options, name) for name in COMPARED} | {"atomic": call.atomic}
    told: list[_Told] = same_arguments(ranks, "sync", given, LoadError, call.check, tell)
    summaries = [each.ends for each in told if each.ends is not None]
    if len(summaries) < ranks.size:
        ranks.own("looking at both ends", lambda: _raise_any(problems))
    dst, src = ends
    token = told[0].token
    if kept is not None and token and all(each.token == token for each in told):
        return Agreement(kept, dst, src, False, told[0].seed)
    plan = Planner(summaries, ranks, call.options).plan(dst, src)
    made = KeptPlan(told[0].new, where, plan, (dst.described, src.described))
    return Agreement(made, dst, src, True, told[0].seed)


def _look(call: SyncCall, ranks: Ranks, kept: KeptPlan | None) -> tuple[End, End]:
    """dst and src as this rank has them; those that are as before have digests that are known.

    Raises:
        LoadError: tensors that cannot be read or written, or that `layout=` does not fit.
    """
    options = call.options
    into, out_of = pair_of(options.layout)
    dst = look(call.dst, lay_out=lambda tensors: lay_out(tensors, into, ranks))
    source = with_ties(call.src)
    src = look(source, merge=options.merge, lay_out=lambda t: lay_out(t, out_of, ranks))
    if kept is not None and (dst.described, src.described) == kept.described:
        dst, src = (
            replace(end, described=known)
            for end, known in zip((dst, src), kept.described, strict=True)
        )
    return dst, src


def _is_served(ends: Sequence[End], kept: KeptPlan) -> bool:
    """Whether a kept plan is for both ends as they are now."""
    return all(end.described is known for end, known in zip(ends, kept.described, strict=True))


def _summary(dst: End, src: End) -> EndsSummary:
    check_values(src)
    at = src.described.coordinates, dst.described.coordinates
    return EndsSummary(src.digest, at[0], dst.digest, at[1])


def _raise_any(problems: Sequence[Exception]) -> None:
    if problems:
        raise problems[0]


def _check_end(name: str, given: Any) -> None:
    """Refuse what is neither a model nor a dict of tensors nor None.

    Raises:
        TypeError: names the argument.
    """
    if given is None or isinstance(given, nn.Module):
        return
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name}= takes a torch.nn.Module, a dict of tensors or None, not "
            f"{type(given).__name__}"
        )
    unnamed = [key for key in given if not isinstance(key, str)]
    if unnamed:
        raise TypeError(
            f"{name}= has the key {unnamed[0]!r}, a {type(unnamed[0]).__name__}: give a dict from "
            "names (str) to tensors"
        )
    wrong = [key for key, value in given.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"{name}= holds {wrong[0]!r}, a {type(given[wrong[0]]).__name__}: give a dict of "
            "tensors"
        )
