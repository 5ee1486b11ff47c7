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
from anyrank.loading.sync_move import Mover, Places
from anyrank.loading.sync_planning import SyncPlan, agree_plan
from anyrank.loading.sync_report import SyncReport
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
        process_group: the ranks that take part, or `anyrank.ALONE` for this process by itself.
            Default: all, or this process alone where no group is initialised.

    Returns:
        The report, equal on all ranks.

    Raises:
        LoadError: the two do not fit each other, cannot be read or written, or ranks were called
            with different arguments; on all ranks. Nothing has changed, or the message says that
            `dst` is partly overwritten.
        RankError: a rank died, did not come, called something else, or failed in an unforeseen way;
            on all ranks.
        ValueError, TypeError: an argument that is wrong in itself; on all ranks.
    """
    meter = Meter()
    options = Options(missing, unexpected, cast, rename)
    # Under inference mode new parameters would never get gradients.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        open_ranks(process_group, "sync()") as ranks,
    ):
        _agree_arguments(ranks, dst, src, options)
        plan, (to, of), is_planned, seed = agree_plan(
            lambda: (look(dst), look(src)), options, ranks
        )
        report = _Sync(plan, to, of, ranks, meter, seed).run(is_planned)
        _take_back_renewed(dst, to)
    if ranks.index == 0:
        _log(report)
    return report


def _agree_arguments(ranks: Ranks, dst: Any, src: Any, options: Options) -> None:
    """Check the arguments, and compare them over the ranks. All ranks.

    Raises:
        ValueError, TypeError, LoadError: as `sync`.
    """

    def check() -> None:
        for name, given in (("dst", dst), ("src", src)):
            if given is None or isinstance(given, nn.Module):
                continue
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"{name}= takes a torch.nn.Module, a dict of tensors or None, not "
                    f"{type(given).__name__}"
                )
            wrong = [k for k, v in given.items() if not isinstance(v, torch.Tensor)]
            if wrong:
                raise TypeError(
                    f"{name}= holds {wrong[0]!r}, a {type(given[wrong[0]]).__name__}: give a dict "
                    "of tensors"
                )
        options.check()

    names = ("missing", "unexpected", "cast", "rename")
    given = {name: getattr(options, name) for name in names}
    ranks.same_arguments("sync", given, LoadError, check)


@dataclass
class _Sync:
    """One sync on one rank, as planned."""

    plan: SyncPlan
    dst: End
    src: End
    ranks: Ranks
    meter: Meter
    seed: int

    def run(self, is_planned: bool) -> SyncReport:
        """Carry it out. All ranks.

        Raises:
            AnyrankError: of any rank, on all ranks.
        """
        match: ModelMatch = self.plan.match.of(self.dst.tensors)
        share = Share(self.dst.module, match, self.seed, self.meter)

        def prepare() -> tuple[Mover, None]:
            share.allocate()
            return self._mover(share, match), None

        mover, _ = self.ranks.own_and_all("allocating memory", prepare)
        try:
            self.ranks.together("passing on the weights", mover.run)
        except AnyrankError as error:
            text = f"{error}\n  tensors of dst that were real are partly overwritten: sync again"
            raise type(error)(f"{text} before use", causes=error.causes) from error
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if self.plan.rebuild:
            rebuilt, replacements = rebuilt_values(
                [*self.dst.tensors], self.ranks, share.initialiser, share.device, self.src.tensors
            )

        def commit() -> tuple[tuple[int, ...], float, dict[str, str], list[str]]:
            share.initialise()
            renewed = share.commit(replacements)
            share.move_buffers()
            moved = (mover.sent, mover.received, mover.copied, *self.meter.peaks())
            return moved, self.meter.seconds(), share.rules, renewed

        answers = self.ranks.together("putting the weights in place", commit)
        facts = self.plan.facts
        sent, received, copied, host, device = zip(*(each for each, *_ in answers), strict=True)
        return SyncReport(
            tensors=facts.tensors,
            missing=facts.missing,
            unexpected=facts.unexpected,
            kept=facts.kept,
            initialised={n: rule for _, _, rules, _ in answers for n, rule in rules.items()},
            rebuilt=rebuilt,
            renamed=facts.renamed,
            tied=facts.tied,
            duplicates=facts.duplicates,
            cast=facts.cast,
            frozen=facts.frozen,
            renewed=sorted({name for *_, names in answers for name in names}),
            bytes_sent=list(sent),
            bytes_received=list(received),
            bytes_copied=list(copied),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            is_planned=is_planned,
            seconds=max(seconds for _, seconds, *_ in answers),
        )

    def _mover(self, share: Share, match: ModelMatch) -> Mover:
        sources = {
            number: self.src.tensors[index].local() for number, index in self.plan.locals.items()
        }
        targets = {index: share.local(index) for index in match.stored}
        return Mover(self.plan, Places(sources, targets), self.ranks, self.meter.sample)


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
