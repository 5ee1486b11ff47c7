"""`anyrank.sync`: copy live weights of one model into another, whatever their layouts are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from anyrank.live.agreement import KeptPlan, Layouts, SyncCall, agree_plan
from anyrank.live.live import execute_sync
from anyrank.live.report import SyncReport
from anyrank.loading.report import log_report
from anyrank.models.memory_meter import Meter
from anyrank.models.options import LoadOptions
from anyrank.tensors.names import Rename
from anyrank.world.group import Group
from anyrank.world.ranks import open_ranks

log = logging.getLogger("anyrank.sync")


def sync(
    dst: nn.Module | Mapping[str, torch.Tensor] | None,
    src: nn.Module | Mapping[str, torch.Tensor] | None,
    *,
    rename: Rename = None,
    cast: Literal["float", "any"] = "float",
    missing: Literal["error", "init", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    layout: Layouts = None,
    merge: bool = False,
    verify: bool = False,
    atomic: bool = False,
    process_group: Group = None,
) -> SyncReport:
    """Copy the current weights of `src` into `dst`, for example from trainer to generator.

    Collective: every rank of the group must call it. `src` and `dst` may be on the same, on
    different, or on partly overlapping ranks, each plain, DDP, FSDP2, tensor parallel or a mixture.
    Each byte goes directly from a rank that has it to the ranks that lack it, in the smaller of the
    two dtypes, through a window of 8 MiB (ANYRANK_BUFFER_BYTES). Names, shapes and dtypes are
    compared on every rank before the first byte moves. Use a `Sync` for repeated syncs, because it
    keeps its plan.

    Example::

        trainer, generator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        report = anyrank.sync(generator, trainer)  # on ranks without a trainer: (generator, None)
        assert torch.equal(generator.weight, trainer.weight)

    Args:
        dst: a model, or a dict of tensors, that is written in place; tensors on meta get memory.
            None on ranks that have no part of it.
        src: a model, or a dict of tensors. None on ranks that have no part of it.
        rename: from the names of `src` to those of `dst`: a dict of names or prefixes, a list of
            (regex, replacement), or a callable.
        cast: "float" casts between floating dtypes and widens integers; "any" casts everything that
            torch can.
        missing: what to do with tensors of `dst` that `src` does not contain: "error"; "keep"
            leaves them unchanged; "init" gives them the model's own initial values.
        unexpected: what to do with tensors of `src` that fill nothing: "error" or "ignore".
        layout: for plain tensors that are this rank's part of a larger tensor: a dict of name or
            pattern to (mesh, placements), or a function of the name; a pair of these for `dst` and
            `src` if the two differ. Ranks may pass different ones.
        merge: send `src` with its adapters merged, as by PEFT's `merge_and_unload()`: the product
            of the LoRA factors is added to the sent values, and `src` is unchanged. During the
            call, each rank that sends holds the whole factors.
        verify: compare digests of both ends afterwards, and compare replicas in `src`.
        atomic: keep the values of `dst` until every rank has received its share, at the cost of a
            second share.
        process_group: the ranks that take part, or `anyrank.ALONE` for only this process. Default:
            all ranks, or only this process if no group is initialized.

    Returns:
        The report, the same on every rank.

    Raises:
        LoadError: the two do not match, cannot be read or written, or ranks passed different
            arguments; on every rank. Either nothing has changed, or the message says that `dst` is
            partly overwritten. With `verify`: the two ends differ.
        RankError: a rank died, did not call, called something different, or failed with an
            unexpected error; on every rank.
        ValueError, TypeError: an argument is wrong in itself; on every rank.
    """
    return Sync(
        dst,
        src,
        rename=rename,
        cast=cast,
        missing=missing,
        unexpected=unexpected,
        layout=layout,
        merge=merge,
        verify=verify,
        atomic=atomic,
        process_group=process_group,
    )()


class Sync:
    """A sync that is called repeatedly, such as in each iteration of a trainer and a generator.

    It has the arguments of `anyrank.sync`, and keeps the plan: a later call compares a few bytes
    between the ranks and moves the weights. Every rank must create one, which costs nothing. Calls
    are collective: every rank of the group must call it. Any change since the last call (replaced,
    resharded, tied or frozen tensors, a different dtype) is detected on every rank, and a new plan
    is made.

    Example::

        trainer, generator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        weights = anyrank.Sync(generator, trainer)
        for step in range(3):
            report = weights()
        assert weights.version == 3
        assert not report.is_planned  # the plan is that of the first call

    Args:
        dst, src, rename, cast, missing, unexpected, layout, merge, verify, atomic, process_group:
            as for `anyrank.sync`; each call checks them, and compares them between the ranks.

    Attributes:
        version: number of finished calls. A call that raises does not count.
    """

    def __init__(
        self,
        dst: nn.Module | Mapping[str, torch.Tensor] | None,
        src: nn.Module | Mapping[str, torch.Tensor] | None,
        *,
        rename: Rename = None,
        cast: Literal["float", "any"] = "float",
        missing: Literal["error", "init", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        layout: Layouts = None,
        merge: bool = False,
        verify: bool = False,
        atomic: bool = False,
        process_group: Group = None,
    ) -> None:
        options = LoadOptions(
            missing=missing,
            unexpected=unexpected,
            cast=cast,
            rename=rename,
            verify=verify,
            merge=merge,
        )
        self.version = 0
        self._call = SyncCall(dst, src, options, layout, atomic)
        self._group = process_group
        self._kept: KeptPlan | None = None

    def __call__(self) -> SyncReport:
        """Copy the current weights of `src` into `dst`. Collective: every rank must call it.

        Returns:
            The report, the same on every rank.

        Raises:
            AnyrankError, ValueError, TypeError: as for `anyrank.sync`; on every rank.
        """
        meter = Meter()
        # Under inference mode new parameters would never get gradients.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            open_ranks(self._group, "sync()") as ranks,
        ):
            agreed = agree_plan(self._call, ranks, self._kept)
            self._kept = agreed.kept
            report = execute_sync(self._call, agreed, ranks, meter)
        self.version += 1
        if ranks.index == 0:
            log_report(report, log, "src", "dst")
        return report
