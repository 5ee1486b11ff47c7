"""`anyrank.sync`: live weights of one model into another, in whatever layout each of them is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anyrank.errors import AnyrankError, LoadError
from anyrank.loading.buffers import rebuilt_values
from anyrank.loading.match_model import ModelMatch
from anyrank.loading.memory_meter import Meter, collector_paused
from anyrank.loading.options import Options
from anyrank.loading.replace import Replacement
from anyrank.loading.share import Share
from anyrank.loading.sync_ends import End, look
from anyrank.loading.sync_move import WHAT, Mover, Places
from anyrank.loading.sync_planning import Agreement, agree_plan
from anyrank.loading.sync_report import SyncReport, forget, remember
from anyrank.loading.sync_verify import check_before, check_equal
from anyrank.loading.verify import compare_replicas
from anyrank.tensors.names import Rename
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.sync")


@collector_paused()
def sync(
    dst: nn.Module | Mapping[str, torch.Tensor] | None,
    src: nn.Module | Mapping[str, torch.Tensor] | None,
    *,
    rename: Rename = None,
    cast: Literal["float", "any"] = "float",
    missing: Literal["error", "init", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
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
        verify: digest what both ends hold afterwards, and compare, and replicas in `src` as well.
        atomic: keep the values of `dst` until all ranks have received all of theirs, at the cost of
            a second share.
        version: a number for these weights, as the trainer's step. Ranks that give one have to give
            the same; `SyncReport.last(dst)` tells it later. Default: one more than `dst` has.
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
    options = Options(missing, unexpected, cast, rename, verify=verify)
    # Under inference mode new parameters would never get gradients.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        open_ranks(process_group, "sync()") as ranks,
    ):
        _agree_arguments(ranks, dst, src, options, atomic, version)
        last = SyncReport.last(dst) if isinstance(dst, nn.Module) else None
        agreed = agree_plan(
            lambda: (look(dst), look(src)), options, ranks, version, last.version if last else 0
        )
        report = _Sync(agreed, dst, ranks, meter, verify, atomic).run()
        _take_back_renewed(dst, agreed.dst)
        remember(dst, report)
    if ranks.index == 0:
        _log(report)
    return report


def _agree_arguments(
    ranks: Ranks, dst: Any, src: Any, options: Options, atomic: Any, version: Any
) -> None:
    """Check the arguments, and compare them over the ranks. All ranks.

    Raises:
        ValueError, TypeError, LoadError: as `sync`.
    """

    def check() -> None:
        for name, given in (("dst", dst), ("src", src)):
            _check_end(name, given)
        if not isinstance(atomic, bool):
            raise TypeError(f"atomic={atomic!r}: give True or False")
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise TypeError(f"version={version!r}: give a whole number, or None")
        options.check()

    names = ("missing", "unexpected", "cast", "rename", "verify")
    given = {name: getattr(options, name) for name in names}
    ranks.same_arguments("sync", {**given, "atomic": atomic}, LoadError, check)


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
    wrong = [key for key, value in given.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"{name}= holds {wrong[0]!r}, a {type(given[wrong[0]]).__name__}: give a dict of "
            "tensors"
        )


@dataclass
class _Sync:
    """One sync on one rank, as planned."""

    agreed: Agreement
    given: object
    ranks: Ranks
    meter: Meter
    verify: bool
    atomic: bool

    def run(self) -> SyncReport:
        """Carry it out. All ranks.

        Raises:
            AnyrankError: of any rank, on all ranks.
        """
        agreed, plan = self.agreed, self.agreed.plan
        match: ModelMatch = plan.match.of(agreed.dst.tensors)
        share = Share(agreed.dst.module, match, agreed.seed, self.meter)

        def prepare() -> tuple[tuple[Places, Mover], None]:
            share.allocate(real_too=self.atomic)
            places = self._places(share, match)
            return (places, Mover(plan, places, self.ranks, self.meter.sample)), None

        (places, mover), _ = self.ranks.own_and_all("allocating memory", prepare)
        check_before(plan.flows, places, self.ranks)
        verified = self._move(mover, places, share)
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if plan.rebuild:
            rebuilt, replacements = rebuilt_values(
                agreed.dst.tensors, self.ranks, share.initialiser, share.device, agreed.src.tensors
            )

        def commit() -> tuple[tuple[int, ...], float, dict[str, str], list[str]]:
            renewed = share.commit(replacements)
            share.move_buffers()
            moved = (mover.sent, mover.received, mover.copied, *self.meter.peaks())
            return moved, self.meter.seconds(), share.rules, renewed

        answers = self.ranks.together("putting the weights in place", commit)
        sent, received, copied, host, device = zip(*(each for each, *_ in answers), strict=True)
        return SyncReport(
            **vars(plan.facts),
            initialised={n: rule for _, _, rules, _ in answers for n, rule in rules.items()},
            rebuilt=rebuilt,
            renewed=sorted({name for *_, names in answers for name in names}),
            bytes_sent=list(sent),
            bytes_received=list(received),
            bytes_copied=list(copied),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            is_planned=agreed.is_planned,
            verified=verified,
            version=agreed.version,
            seconds=max(seconds for _, seconds, *_ in answers),
        )

    def _move(self, mover: Mover, places: Places, share: Share) -> str:
        """Move the bytes, and compare both ends; what was compared, in words. All ranks."""
        replicas = 0
        if self.verify:
            sent = [t for t in self.agreed.src.tensors if t.kind == "parameter"]
            replicas = compare_replicas(sent, self.ranks)
        if not self.atomic:
            forget(self.given)
        try:
            self.ranks.together(WHAT, lambda: (mover.run(), share.initialise()))
            if not self.verify:
                return ""
            moved = [flow for flow in self.agreed.plan.flows if not flow.is_compared]
            check_equal(moved, places, self.ranks)
        except AnyrankError as error:
            left = "tensors of dst that were real are partly overwritten: sync again before use"
            left = "dst keeps its values" if self.atomic else left
            raise type(error)(f"{error}\n  {left}", causes=error.causes) from error
        return f"{len(moved)} tensors at both ends, {replicas} among the ranks of src"

    def _places(self, share: Share, match: ModelMatch) -> Places:
        sources = {
            number: self.agreed.src.tensors[index].local()
            for number, index in self.agreed.plan.locals.items()
        }
        filled = (*match.stored, *match.compared)
        return Places(sources, {index: share.local(index) for index in filled})


def _take_back_renewed(given: object, end: End) -> None:
    """A dict gets the new tensor objects of what was on meta, as a module does."""
    if isinstance(given, dict) and not isinstance(given, nn.Module):
        for key, tensor in end.module.__dict__["_parameters"].items():
            if given[key] is not tensor:
                given[key] = tensor


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
