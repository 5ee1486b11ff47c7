"""`anyrank.sync`: live weights of one model into another, in whatever layout each of them is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from anyrank.checks import check_bool, check_int
from anyrank.errors import LoadError
from anyrank.model.given_layouts import Layouts
from anyrank.model.memory_meter import Meter
from anyrank.model.options import LoadOptions
from anyrank.syncing.execute import execute_sync
from anyrank.syncing.report import SyncReport
from anyrank.tensors.names import Rename
from anyrank.world.arguments import same_arguments
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks

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
    version: int | None = None,
    process_group: Group = None,
) -> SyncReport:
    """Give `dst` the weights that `src` has now: from trainer to generator, from model to teacher.

    Every rank of the group calls it. `src` and `dst` may be on the same ranks, on others, or on
    some of the same, each plain, DDP, FSDP2, tensor parallel or a mixture: each byte goes straight
    from a rank that has it to the ranks that lack it, in the smaller of the two dtypes, through a
    window of 8 MiB (ANYRANK_BUFFER_BYTES). Names, shapes and dtypes are compared on all ranks
    before the first byte moves. A second call with the same layouts uses the plan of the first.

    Example::

        trainer, generator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        report = anyrank.sync(generator, trainer)  # on ranks without a trainer: (generator, None)
        assert torch.equal(generator.weight, trainer.weight)

    Args:
        dst: a model, or a dict of tensors, that is written to in place; what is on meta gets
            memory. None on ranks that have no part of it.
        src: a model, or a dict of tensors. None on ranks that have no part of it.
        rename: from the names of `src` to those of `dst`: a dict of names or prefixes, a list of
            (regex, replacement), or a callable.
        cast: "float" casts between floating dtypes and widens integers; "any" casts whatever torch
            can.
        missing: what to do with tensors of `dst` that `src` does not hold: "error"; "keep" leaves
            them; "init" gives them the model's own initial values.
        unexpected: what to do with tensors of `src` that fill nothing: "error" or "ignore".
        layout: for plain tensors that are this rank's part of a whole: a dict of name or pattern to
            (mesh, placements), or a function of the name; a pair of these for `dst` and `src`
            where the two differ. Ranks may give different ones.
        merge: send the model that `src` is with its adapters merged, as PEFT's `merge_and_unload()`
            makes it: the product of the LoRA factors is added to what is sent, and `src` stays as
            it is. Each rank that sends holds the factors whole meanwhile.
        verify: digest what both ends hold afterwards, and compare, and replicas in `src` as well.
        atomic: keep the values of `dst` until all ranks have received all of theirs, at the cost of
            a second share.
        version: a number for these weights, as the trainer's step, 0 or more, also below the one
            that `dst` has. Ranks that give one have to give the same; `SyncReport.last(dst)` tells
            it later. Default: one more than `dst` has.
        process_group: the ranks that take part, or `anyrank.ALONE` for this process by itself.
            Default: all, or this process alone where no group is initialised.

    Returns:
        The report, equal on all ranks.

    Raises:
        LoadError: the two do not fit each other, cannot be read or written, or ranks were called
            with different arguments; on all ranks. Nothing has changed, or the message says that
            `dst` is partly overwritten. With `verify`: both ends are not equal.
        RankError: a rank died, did not come, called something else, or failed in an unforeseen way;
            on all ranks.
        ValueError, TypeError: an argument that is wrong in itself; on all ranks.
    """
    meter = Meter()
    options = LoadOptions(
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        rename=rename,
        verify=verify,
        layout=layout,
        merge=merge,
    )
    # Under inference mode new parameters would never get gradients.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        open_ranks(process_group, "sync()") as ranks,
    ):
        _agree_arguments(ranks, dst, src, options, atomic, version)
        report = execute_sync(dst, src, options, ranks, meter, atomic=atomic, version=version)
    if ranks.index == 0:
        _log(report)
    return report


def _agree_arguments(
    ranks: Ranks, dst: Any, src: Any, options: LoadOptions, atomic: Any, version: Any
) -> None:
    """Check the arguments, and compare them over the ranks. All ranks.

    Raises:
        ValueError, TypeError, LoadError: as `sync`.
    """

    def check() -> None:
        for name, given in (("dst", dst), ("src", src)):
            _check_end(name, given)
        check_bool(atomic=atomic)
        if version is not None:
            check_int(
                "version", version, 0, kind=int
            )  # other ranks compare it, and a report has it
        options.check()

    names = ("missing", "unexpected", "cast", "rename", "verify", "merge")
    given = {name: getattr(options, name) for name in names}
    same_arguments(ranks, "sync", {**given, "atomic": atomic}, LoadError, check)


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


def _log(report: SyncReport) -> None:
    """What differs from a plain, whole sync is a warning (promise 8)."""
    log.info("%s", report)
    for title, items in (
        ("given initial values, as src does not hold them", list(report.initialised)),
        ("kept as they were, as src does not hold them", report.kept),
        ("of src ignored, as dst has none of these names", report.unexpected),
        ("are new objects, as something else referred to the meta tensor", report.renewed),
    ):
        if items:
            log.warning("%d tensors %s: %s", len(items), title, ", ".join(items[:10]))
