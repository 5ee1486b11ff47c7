"""The plan of a sync: agreed by all ranks, kept by both layouts.

What the ranks exchange is small: a digest of each end and coordinates in its meshes. Only if some
rank has not planned these very ends before, one rank of each layout describes it to the others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.model.options import LoadOptions
from anyrank.syncing.ends import End, check_values
from anyrank.syncing.flows import EndsSummary, Planner, SyncPlan, renamed_by
from anyrank.world.failures import different
from anyrank.world.ranks import Ranks

KEPT_PLANS = 8  # of the latest calls of this process; they hold no tensors


_kept: OrderedDict[Any, tuple[str, SyncPlan]] = OrderedDict()


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on before the first byte.

    Attributes:
        plan: this rank's part of it.
        dst, src: as they are on this rank.
        is_planned: whether the plan was made now.
        seed: the first rank's torch seed.
        version: of the weights that are sent.
    """

    plan: SyncPlan
    dst: End
    src: End
    is_planned: bool
    seed: int
    version: int


def agree_plan(
    look: Callable[[], tuple[End, End]],
    options: LoadOptions,
    ranks: Ranks,
    version: int | None,
    held: int,
) -> Agreement:
    """The plan that all ranks follow. All ranks; nothing is changed.

    Args:
        look: gives dst and src as they are on this rank.
        options: what the caller allows, the same on all ranks.
        ranks: of the call.
        version: that this rank gives the weights, if it does.
        held: version that this rank's dst has now.

    Raises:
        LoadError: the ends do not fit each other, on any rank; on all ranks.
    """
    choices = (options.missing, options.unexpected, options.cast, str(options.merge))

    def introduce() -> tuple[tuple[End, End, Any, SyncPlan | None], EndsSummary]:
        dst, src = look()
        check_values(src)
        rename = options.rename
        by_function = callable(rename)
        choice = (*choices, by_function, "" if by_function else repr(rename))
        where = (dst.digest, dst.coordinates, src.digest, src.coordinates, ranks.ranks, choice)
        known, plan = _kept.get(where, ("", None))
        if plan is not None and plan.renamed != renamed_by(plan.renamed, options):
            known, plan = "", None  # a function may answer differently now
        seed = torch.initial_seed()
        at = (src.digest, src.coordinates, dst.digest, dst.coordinates)
        return (dst, src, where, plan), EndsSummary(*at, known, seed, version, held)

    (dst, src, where, plan), summaries = ranks.own_and_all("looking at both ends", introduce)
    agreed = _agreed_version(dict(zip(ranks.ranks, summaries, strict=True)), ranks)
    key = _key(summaries, choices)
    made = plan is None or any(summary.known != key for summary in summaries)
    if made:
        plan = Planner(summaries, ranks, options).plan(dst, src)
        _kept[where] = key, plan
        while len(_kept) > KEPT_PLANS:
            _kept.popitem(last=False)
    _kept.move_to_end(where)
    assert plan is not None
    return Agreement(plan, dst, src, made, summaries[0].seed, agreed)


def _agreed_version(summaries: Mapping[int, EndsSummary], ranks: Ranks) -> int:
    """The version that ranks gave, else the next one.

    Raises:
        LoadError: ranks gave different ones.
    """
    given = {
        rank: summary.version for rank, summary in summaries.items() if summary.version is not None
    }
    if len(set(given.values())) > 1:
        words = {rank: str(version) for rank, version in given.items()}
        text = different("sync(): version= differs between ranks", words, ranks.named)
        raise LoadError(f"{text}: they mean the weights of different steps")
    return next(iter(given.values()), 1 + max(summary.held for summary in summaries.values()))


def _key(summaries: Sequence[EndsSummary], choices: tuple[str, ...]) -> str:
    rows = [(summary.src, summary.src_at, summary.dst, summary.dst_at) for summary in summaries]
    return hashlib.blake2b(repr((rows, choices)).encode(), digest_size=16).hexdigest()
