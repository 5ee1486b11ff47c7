"""`anyrank.load`: weights from any source into any model, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn

from anyrank.loading.agreed_plan import AgreedPlan, plan_load
from anyrank.loading.fill import FillResult, fill
from anyrank.loading.headers import SourceInfo, header_reader, look_at_source
from anyrank.loading.read import OwnBytes, ProgressTo
from anyrank.loading.report import LoadReport, log_report
from anyrank.loading.verify import compare_ties, verify_loaded, verify_source
from anyrank.models.dialects.layouts.given import GivenLayout
from anyrank.models.frozen_parts import frozen_sources
from anyrank.models.memory_meter import Meter
from anyrank.models.options import LoadOptions
from anyrank.models.share import ModelShare
from anyrank.sources.source import Source
from anyrank.tensors.names import Rename
from anyrank.tensors.spec import dtype_name
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.load")


def load(
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
    progress: bool | Callable[[int, int], None] | None = None,
    verify: bool = False,
) -> LoadReport:
    """Load weights into a model that may be wrapped, sharded, compiled or on the meta device.

    Collective: every rank of the group must call it, with the same model and source. Each rank
    ends up with its own share and, where possible, reads nothing else. Parameter objects are kept.
    Names, shapes and dtypes are compared on every rank before the first byte of payload moves. If
    a load fails, even in the middle of reading, a model on the meta device is unchanged.

    Example::

        with anyrank.meta():  # no memory for parameters yet
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        # Wrap or shard it here: fully_shard(model), DistributedDataParallel(model), ...
        weights = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).state_dict()
        report = anyrank.load(model, weights)  # or a path or URL
        assert torch.equal(model[1].weight, weights["1.weight"])
        missing, unexpected = report
        assert not missing and not unexpected

    Args:
        model: plain, DDP, FSDP2 (`fully_shard`), tensor parallel, PEFT, compiled, partly frozen;
            real, on the meta device, or mixed.
        source: a path or URL (Hugging Face folder, `.safetensors`, `.pt .pth .bin .ckpt`, DCP
            folder, anyrank run), a list of files, or a dict of tensors, plain or sharded. None on
            ranks that have no source: they receive their share from ranks that do.
        missing: what to do with tensors that the source does not contain: "error"; "init" gives
            them the model's own initial values, the same on any number of ranks; "keep" leaves
            them unchanged.
        unexpected: what to do with keys that fill no tensor of the model: "error" or "ignore".
        cast: "float" casts between floating dtypes and widens integers; "any" casts everything that
            torch can.
        rename: from the source's keys to the model's names: a dict of keys or prefixes, a list of
            (regex, replacement), or a callable; a key that becomes "" is left out. It also selects
            one of several tables of tensors in a source: {"ema": ""}.
        layout: for plain tensors that are this rank's part of a larger tensor, as in Megatron and
            vLLM: a dict of name or pattern to (mesh, placements), or a function of the name. The
            ranks' parts must have no gap and no overlap.
        strategy: "own": each rank reads its own bytes; "stripe": replicas read disjoint parts and
            exchange them; "scatter": one rank reads, and sends each rank its rows; "auto"
            (default) chooses one.
        buffer_bytes: staging memory of one rank, in bytes. Default: ANYRANK_BUFFER_BYTES, for a
            model on CUDA ANYRANK_CUDA_BUFFER_BYTES.
        process_group: the ranks that take part, or `anyrank.ALONE` for only this process.
            Default: all ranks, or only this process if no group is initialized.
        progress: True, False, or a function that is called with (bytes done, total bytes) on the
            first rank. Default: a bar on the first rank if there is a terminal.
        verify: compare the files with the checksums that came with them before anything is loaded,
            and replicas with one another afterwards; count NaN and infinities.

    Returns:
        The report, the same on every rank. `missing, unexpected = load(...)` works too.

    Raises:
        LoadError: the source does not match the model, cannot be read or is corrupt, or ranks
            passed different arguments; on every rank.
        UnsafeFile: a pickle that would run code, or a header with impossible sizes; on every rank.
        RankError: a rank died, did not call, called something different, or failed with an
            unexpected error; on every rank.
        ValueError, TypeError: an argument that is wrong in itself; on every rank.
    """
    meter = Meter()
    options = LoadOptions(
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        rename=rename,
        strategy=strategy,
        buffer_bytes=buffer_bytes,
        progress=progress,
        verify=verify,
        layout=layout,
    )
    # Under inference mode new parameters would never get gradients.
    with (
        torch.inference_mode(False),
        open_ranks(process_group, "load()", may_be_alone=True) as ranks,
    ):
        headers = header_reader(source, partial(frozen_sources, model), ranks)
        tell = partial(look_at_source, source, ranks, headers)
        info = options.agree(ranks, "load", model, source, tell, SourceInfo.join)
        if info.is_live:
            from anyrank.live.load_live import load_live

            report = load_live(model, source, options, ranks, meter)
            _log(report, ranks)
            return report
        plan = plan_load(model, source, ranks, options, info, headers)
        if plan.match.stored_twice:
            compare_ties(plan.match, plan.reading.reading_ranks, ranks)
        # Files are compared before anything is filled, the loaded values afterwards.
        reading_ranks = plan.reading.reading_ranks
        verified = verify_source(plan.match, reading_ranks, ranks) if verify else []
        result = fill_from_files(plan, ranks, meter, progress)
        nonfinite = verify_loaded(plan.match, plan.coordinates, ranks) if verify else {}
        report = _report(plan, result, ", ".join(verified), nonfinite)
    _log(report, ranks)
    return report


def _report(
    plan: AgreedPlan, result: FillResult, verified: str, nonfinite: dict[str, int]
) -> LoadReport:
    """Make the report of a load.

    Args:
        plan: the plan that was carried out.
        result: the result of the fill.
        verified: a text that says what `verify=True` compared.
        nonfinite: tensor -> number of NaN and infinite values.
    """
    match, tensors = plan.match, plan.match.tensors
    return LoadReport(
        **result.fields(),
        missing=match.missing,
        unexpected=match.unexpected,
        kept=[n for i in match.keep if (n := tensors[i].name) not in result.rules],
        tied=match.tied,
        cast={
            tensors[i].name: f"{kind} -> {dtype_name(tensors[i].dtype)}"
            for i, stored in match.stored.items()
            if (kind := match.listing.kind_of(stored)) != dtype_name(tensors[i].dtype)
        },
        own_code=result.own_code.ran,
        own_code_not_run=result.own_code.not_run,
        frozen=match.frozen,
        format=match.listing.format,
        strategy=plan.reading.strategy,
        reason=plan.reading.reason,
        nonfinite=nonfinite,
        verified=verified,
        skipped=[
            *match.listing.skipped_texts,
            *(f"{key}: not needed by the model" for key in match.ignored),
            *match.idle,
        ],
        duplicates=match.stored_twice,
        tensors=len({*match.stored, *match.compared}),
        bytes_read=[moved.read for moved in result.moved],
    )


def _log(report: LoadReport, ranks: Ranks) -> None:
    """Log the report on the first rank."""
    if ranks.index:
        return
    log_report(report, log, "the source", "the model")
    if "no checksums" in report.verified:
        log.warning("%s", report.verified)


def fill_from_files(
    plan: AgreedPlan, ranks: Ranks, meter: Meter, progress: ProgressTo
) -> FillResult:
    """Carry out an agreed plan. Collective.

    Raises:
        LoadError: an error of any rank, on every rank.
    """
    share = ModelShare(plan.match, meter, plan.initializer)
    if plan.reading.flows is None:
        side = OwnBytes(plan, ranks, meter, progress)
    else:
        from anyrank.loading.sharing.shared_blocks import SharedBlocks

        side = SharedBlocks(plan, plan.reading.flows, ranks, meter, progress)
    return fill(share, side, ranks, rebuild=plan.rebuild)
