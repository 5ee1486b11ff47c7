"""A live model into files, by all ranks at once: what is asked for, and what it becomes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from anyrank.conversion.destination import Destination, destination
from anyrank.conversion.file_names import configuration, file_named
from anyrank.conversion.live_files import parts_of, write_files
from anyrank.conversion.options import ConvertOptions
from anyrank.conversion.planning import plan_output
from anyrank.conversion.report import ConvertReport
from anyrank.errors import LoadError
from anyrank.files.content_hash import content_hash
from anyrank.files.output import OutputTensor
from anyrank.model.given_layouts import apply_layouts
from anyrank.model.own_code import added_to_state_dict, changed_in_state_dict, extra_states
from anyrank.model.tensors import ModelTensor, find_tensors, in_state_dict
from anyrank.model.verify import check_alike, compare_replicas
from anyrank.tensors.names import renamer
from anyrank.tensors.sharded_tensor import Coordinates, Described, coordinates_of, lazy_view
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tensors.writes import plan_writes
from anyrank.wording import count
from anyrank.world.arguments import same_arguments
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks


@dataclass(frozen=True, slots=True)
class _Summary:
    described: list[Described]
    tied: dict[str, str]
    coordinates: Coordinates
    buffers: dict[str, str]


def convert_live(
    src: object,
    dst: str | os.PathLike[str],
    checked: Callable[[], ConvertOptions],
    process_group: Group,
) -> ConvertReport:
    """As `convert`, of a model. All ranks.

    Args:
        src: the model; `checked` refuses anything else.
        dst: as for `convert`.
        checked: the options; raises for arguments that are wrong in themselves.
        process_group: as for `convert`.
    """
    start = time.perf_counter()
    with torch.inference_mode(False), open_ranks(process_group, "convert()", into(dst)) as ranks:
        options, place, is_file = _agreed(dst, checked, ranks)
        assert isinstance(src, nn.Module)
        model = src
        place = replace(place, folder=ranks.from_one("naming the folder", lambda: place.folder))
        found = _tensors(model, options, ranks)
        targets, summaries = ranks.own_and_all(
            "naming the tensors", lambda: _look(model, found, renamer(options.rename))
        )
        _check_alike(summaries, ranks)
        alike = [held for held in targets if held.kind == "parameter" or held.layout is not None]
        compare_replicas(alike, ranks)
        tensors = [
            OutputTensor(held.name, held.shape, _cast(held.dtype, options)) for held in targets
        ]
        tied = summaries[0].tied
        with_configuration = options.to == "safetensors" and not is_file
        small = configuration(model, options.dtype) if with_configuration else {}
        output = plan_output(place, tensors, tied, options, metadata={})
        output = replace(output, small={**small, **output.small})
        places_of = {r: s.coordinates for r, s in zip(ranks.ranks, summaries, strict=True)}
        unsynced = {held.name for held in targets} - {held.name for held in alike}
        writes = plan_writes(targets, places_of, by_first=unsynced)
        write_files(place, output, parts_of(output, targets, writes, ranks.rank), ranks)
    differ = [n for n in unsynced if len({summary.buffers.get(n) for summary in summaries}) > 1]
    return ConvertReport(
        source=type(model).__name__,
        path=place.path,
        format=options.to,
        files=[*(file.name for file in output.files), *output.small],
        tensors=len(tensors),
        nbytes=output.nbytes,
        tied=tied,
        cast={
            held.name: f"{dtype_name(held.dtype)} -> {dtype_name(tensor.dtype)}"
            for held, tensor in zip(targets, tensors, strict=True)
            if held.dtype != tensor.dtype
        },
        renamed={},
        merged=[],
        copied=[],
        skipped=_skipped(model, differ),
        verified=f"xxh3-64 of {count(len(output.files), 'file')}, and their headers",
        seconds=time.perf_counter() - start,
    )


def into(dst: object) -> str:
    """A conversion by its destination, which no two conversions of a program share."""
    return f"convert() into {os.path.abspath(str(dst))}"


def _skipped(model: nn.Module, differ: list[str]) -> list[str]:
    """What of the model is not in the output as this rank holds it, and why."""
    return [
        *(f"{name}: differs between ranks; the first rank's was written" for name in differ),
        *(f"{key}: extra state of a module, which is not a tensor" for key in extra_states(model)),
        *(f"{key}: made by a module's own code" for key in added_to_state_dict(model)),
    ]


def _agreed(
    dst: str | os.PathLike[str], checked: Callable[[], ConvertOptions], ranks: Ranks
) -> tuple[ConvertOptions, Destination, bool]:
    """The options, where to write, and whether that is a file: alike on all ranks. All ranks.

    Raises:
        ValueError, TypeError, LoadError: on all ranks, where one rank's arguments are wrong or
            differ.
    """
    found: list[tuple[ConvertOptions, Destination, bool]] = []
    given: dict[str, object] = {}  # filled by `check`, which runs before they are compared

    def check() -> None:
        options = checked()
        is_file = options.is_file(dst)
        place = destination(dst, [], is_file, options.overwrite)
        if not place.store.renames:
            raise ValueError(f"{place.path}: a model is written to local paths: copy it then")
        given["dst"] = os.fspath(dst)
        given.update((name, getattr(options, name)) for name in options.__dataclass_fields__)
        given["layout"] = options.layout is not None  # ranks may give different ones
        found.append((options, place, is_file))

    same_arguments(ranks, "convert", given, LoadError, check)
    return found[0]


def _tensors(model: nn.Module, options: ConvertOptions, ranks: Ranks) -> list[ModelTensor]:
    """This rank's tensors, with what plain ones are parts of. All ranks."""
    found = ranks.own("looking at the model", lambda: in_state_dict(find_tensors(model)))
    if options.layout is not None:
        apply_layouts({"the model": found}, options.layout, ranks)
    return found


def _look(
    model: nn.Module, found: Sequence[ModelTensor], rename: Callable[[str], str]
) -> tuple[list[ModelTensor], _Summary]:
    """This rank's tensors under the names that they get, and what the others are to know."""
    adapters = [held.name for held in found if held.adapter]
    on_meta = [held.name for held in found if held.is_meta]
    views = [problem for held in found if (problem := lazy_view(held))]
    if adapters:
        raise LoadError(
            f"{adapters[0]}: belongs to an adapter: merge it into the model first "
            "(merge_and_unload), or save the adapter with PEFT and convert [base, adapter]"
        )
    if on_meta:
        raise LoadError(f"{on_meta[0]}: is on meta, so there is nothing to write: load first")
    if views:
        raise LoadError(views[0])
    if changed := changed_in_state_dict(model):
        raise LoadError(
            f"{changed[0]}: its module's own code changes it in state_dict(), as {len(changed)} "
            "tensors of this model, and convert writes them as they are: convert what "
            "torch.save(model.state_dict()) wrote"
        )
    if not found:
        raise LoadError("the model has no parameters and no buffers: give one to write")
    files = _file_names(model, found)
    targets = [replace(held, name=rename(files[held.name])) for held in found]
    tied = {
        rename(place.name): target.name
        for held, target in zip(found, targets, strict=True)
        for place in held.registrations
        if place.name != held.name
    }
    names = [*(held.name for held in targets), *tied]
    twice = [name for name, number in Counter(names).items() if number > 1 or not name]
    if twice:
        raise LoadError(f"{twice[0]!r} is the name of two tensors of the model, or empty: rename")
    buffers = {
        held.name: content_hash(held.local())
        for held in targets
        if held.kind == "buffer" and held.layout is None
    }
    described = [held.describe() for held in targets]
    return targets, _Summary(described, tied, coordinates_of(targets), buffers)


def _file_names(model: nn.Module, found: Sequence[ModelTensor]) -> dict[str, str]:
    """Name -> the name that transformers saves a tensor under.

    Raises:
        LoadError: it does not save it as it is.
    """
    stored = {
        held.name: StoredTensor.contiguous(held.name, held.shape, held.dtype, number, 0)
        for number, held in enumerate(found)
    }
    named = {t.chunks: name for name, t in file_named(model, stored).items()}
    changed = [name for name, t in stored.items() if t.nbytes and t.chunks not in named]
    if changed:
        raise LoadError(
            f"{changed[0]}: transformers saves it in parts or transposed, as it does "
            f"{len(changed)} tensors of this model: save a run, and convert that with model="
        )
    return {name: named.get(t.chunks, name) for name, t in stored.items()}


def _check_alike(summaries: Sequence[_Summary], ranks: Ranks) -> None:
    """Raises LoadError on all ranks: their models differ."""
    check_alike([summary.described for summary in summaries], ranks)
    first, ours = ranks.ranks[0], summaries[0].tied
    for rank, summary in zip(ranks.ranks, summaries, strict=True):
        if summary.tied != ours:
            raise LoadError(
                f"the ranks' models differ: rank {first} ties {ours}, rank {rank} {summary.tied}"
            )


def _cast(dtype: torch.dtype, options: ConvertOptions) -> torch.dtype:
    return options.dtype if options.dtype is not None and dtype.is_floating_point else dtype
