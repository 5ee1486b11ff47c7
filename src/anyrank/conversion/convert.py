"""`anyrank.convert`: weights of any source into safetensors, DCP or one torch file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from anyrank.checks import check_model, check_path
from anyrank.conversion.content import Content, StoredContent
from anyrank.conversion.copies import companions
from anyrank.conversion.destination import Destination, destination
from anyrank.conversion.file_names import as_files, configuration
from anyrank.conversion.live import convert_live, into
from anyrank.conversion.merge import LowRank, MergedContent, merged
from anyrank.conversion.options import ConvertOptions, options_of
from anyrank.conversion.planning import check_headers, plan_output
from anyrank.conversion.report import ConvertReport
from anyrank.conversion.selection import Selection, outputs_of, select
from anyrank.conversion.writing import Writer
from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import FORMAT
from anyrank.files.output import Output
from anyrank.files.quantised import check_method, dequantised
from anyrank.files.storage import join_path
from anyrank.files.store import write_file
from anyrank.formats.sources import Source, check_source, list_source
from anyrank.model.given_layouts import GivenLayout
from anyrank.tensors.names import Rename, of_adapter, of_own_adapter
from anyrank.tensors.spec import dtype_name
from anyrank.wording import count
from anyrank.world.connections import call_alone
from anyrank.world.group import Group, members

STEMS = ("diffusion_pytorch_model",)


def convert(
    src: Source | nn.Module,
    dst: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "dcp", "torch"] = "safetensors",
    dtype: torch.dtype | str | None = None,
    rename: Rename = None,
    shard_bytes: int | None = None,
    model: nn.Module | None = None,
    merge: bool = False,
    overwrite: bool = False,
    layout: GivenLayout = None,
    process_group: Group = None,
) -> ConvertReport:
    """Write the weights of a source into a folder or file that other tools read.

    The destination is written beside its place, made durable, read again and compared byte by
    byte, and then renamed: it is whole, or it is not there. Tensors that are one tensor (tied) are
    written once. Host memory: a few MiB, at any size.

    A source on disk is converted by one process. A live model is given by every rank of its group,
    sharded or not: each writes its part of the files, into a folder that all of them see.

    Example::

        torch.save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "w.pt")
        report = anyrank.convert("w.pt", "weights", dtype="bfloat16")
        assert report.files == ["model.safetensors"]
        assert anyrank.inspect("weights").dtypes.keys() == {"bfloat16"}

    Args:
        src: a path or URL, a list of files, or a dict of tensors; as for `load`. Of a run, the
            weights of the newest step. Or a model: plain, DDP, FSDP2, tensor parallel, compiled.
        dst: a path or URL that is not there yet. For "torch", and for "safetensors" if it ends with
            `.safetensors`, it is a file, else a folder.
        to: "safetensors", a Hugging Face folder with the configuration and tokenizer of the
            source's folder; "dcp", for torch.distributed.checkpoint; or "torch", for `torch.load`.
        dtype: of the floating tensors: float64, float32, float16 or bfloat16, also as fp64, fp32,
            fp16 or bf16. Others keep theirs.
        rename: from the source's keys to names: a dict of keys or prefixes, a list of (regex,
            replacement), or a callable. Names that wrappers put in (`module.`, `_orig_mod.`) are
            left out in any case.
        shard_bytes: most bytes of tensors in one file of safetensors. Default: 5 GB.
        model: of a source with a model's own names (a run, DCP, `.pt`): that model, real or on
            meta. Its tensors have to be there, ties are those of the model, and what transformers
            renames, fuses or stacks while it loads is undone.
        merge: of [base, adapter], a LoRA adapter that PEFT saved is added to the base's weights.
        overwrite: replace a file, or a folder that holds weights with their configuration and
            tokenizer and nothing else. Of a link, what it points to.
        layout: of a model whose plain tensors are each rank's part of a whole: a dict of name or
            pattern to (mesh, placements), or a function of the name, as for `sync`.
        process_group: the ranks that hold the model. Default: all, or this process alone where no
            group is initialised.

    Returns:
        The report.

    Raises:
        LoadError: the source cannot be read or is damaged, ranks hold different models, two keys
            get one name, a value does not exist in `dtype`, a tensor has no place in the format,
            or an adapter that is not plain LoRA or makes a weight that is not finite.
        UnsafeFile: a pickle that would run code, or a header that lies.
        RankError: other ranks give a model for the same destination.
        CheckpointError: the destination cannot be written, or does not hold what was written; or a
            damaged run.
        ValueError, TypeError: an argument that is wrong in itself, a destination that is there
            already, or the source itself.
    """

    def checked() -> ConvertOptions:
        options = options_of(to, dtype, rename, shard_bytes, merge, overwrite, layout)
        path = check_path("dst", dst)
        options.check_name(path)
        if model is not None:
            check_model(model)
        if shard_bytes is not None and options.is_file(path):
            raise ValueError(
                f"shard_bytes= is for a folder of weights, and {path} is one file: leave it out"
            )
        if not isinstance(src, nn.Module):
            check_source(src)
            if layout is not None:
                raise ValueError("layout= is for a model: a source on disk holds whole tensors")
            if process_group is not None:
                raise ValueError(
                    "process_group= is for a model: a source on disk is read by one process"
                )
        elif model is not None or merge:
            raise ValueError("model= and merge= are for sources on disk: src is a model already")
        return options

    # With a process group every rank is there, also one that gives no model by mistake.
    if isinstance(src, nn.Module) or process_group is not None:
        return convert_live(src, dst, checked, process_group)
    call_alone(*members(None), into(dst))
    return _convert(src, dst, checked(), model)


def _convert(
    src: Source, dst: str | os.PathLike[str], options: ConvertOptions, model: nn.Module | None
) -> ConvertReport:
    """Of a source that is at rest."""
    start = time.perf_counter()
    is_file = options.is_file(dst)
    place = destination(dst, _paths(src), is_file, options.overwrite)
    listing = list_source(src)
    if options.dtype is not None:
        check_method(listing)
        listing = dequantised(listing, {})
    selection, added = _selected(src, listing, options, model)
    tensors = outputs_of(selection, options.dtype)
    small: dict[str, bytes] = {}
    if not is_file and options.to == "safetensors":
        small = {} if model is None else configuration(model, options.dtype)
        small |= companions(_base_of(src), listing, options.dtype)
    output = plan_output(
        place,
        tensors,
        selection.tied,
        options,
        metadata=listing.metadata,
        stem=_stem(listing, selection),
    )
    content = StoredContent(listing, selection.tensors)
    try:
        content.open()
        compared = content.compare()
        merging = MergedContent(content, added) if added else content
        _write(place, Output(output.files, {**small, **output.small}), merging)
    finally:
        content.reader.close()
    return ConvertReport(
        source=_name_of(src, listing),
        path=place.path,
        format=options.to,
        files=[*(file.name for file in output.files), *output.small, *small],
        tensors=len(tensors),
        nbytes=output.nbytes + sum(map(len, small.values())),
        tied=selection.tied,
        cast={
            tensor.name: f"{kind} -> {dtype_name(tensor.dtype)}"
            for tensor in tensors
            if (kind := listing.kind_of(selection.tensors[tensor.name])) != dtype_name(tensor.dtype)
        },
        renamed=selection.renamed,
        merged=list(added),
        copied=list(small),
        skipped=list(selection.skipped),
        verified=f"xxh3-64 of {count(len(output.files), 'file')}, and their headers; {compared}",
        seconds=time.perf_counter() - start,
    )


def _selected(
    src: Source, listing: Listing, options: ConvertOptions, model: nn.Module | None
) -> tuple[Selection, dict[str, LowRank]]:
    """What is written, by its names in the output, and what an adapter adds to some of it."""
    selection = select(listing, options.rename)
    added: dict[str, LowRank] = {}
    own = [name for name in selection.tensors if of_own_adapter(name)]
    if options.merge:
        selection, added = merged(selection, _paths(src))
    elif len({of_adapter(name) for name in selection.tensors}) > 1:
        raise LoadError("the source is a base with an adapter: give merge=True, or one of them")
    elif own and options.to == "safetensors":
        raise LoadError(
            f"{own[0]}: belongs to an adapter that is still in its model, and who opens a folder "
            "with it would get the base alone: save the adapter (anyrank.integrations.peft.save), "
            "and convert [base, adapter] with merge=True; to='torch' or 'dcp' keeps all as it is"
        )
    return selection if model is None else as_files(selection, listing, model), added


def _paths(src: Source) -> list[str]:
    if isinstance(src, Mapping):
        return []
    return [os.fspath(path) for path in ([src] if isinstance(src, (str, os.PathLike)) else src)]


def _name_of(src: Source, listing: Listing) -> str:
    """The source as it was given; of a run, the step that was read."""
    if isinstance(src, (str, os.PathLike)) and listing.format == FORMAT and listing.files:
        return listing.files[0].path.rpartition("/")[0]
    return ", ".join(_paths(src)) or "memory"


def _base_of(src: Source) -> Source:
    """The folder that configuration and tokenizer are copied from: the only one, or the first."""
    return src if isinstance(src, (Mapping, str, os.PathLike)) else next(iter(src))


def _stem(listing: Listing, selection: Selection) -> str:
    """What the files' names begin with, by which other tools find them."""
    if all(map(of_adapter, selection.tensors)):
        return "adapter_model"
    names = [file.path.rsplit("/", 1)[-1] for file in listing.files]
    return next((s for s in STEMS if any(name.startswith(s) for name in names)), "model")


def _write(place: Destination, output: Output, content: Content) -> None:
    """Write, verify and commit; nothing is left where that fails.

    Raises:
        LoadError: the source cannot be read.
        CheckpointError: the destination cannot be written, or does not hold what was written.
    """
    try:
        place.prepare(output.nbytes)
        writer = Writer(place.store, place.folder, content)
        for file in output.files:
            writer.write(file)
        for name, data in output.small.items():
            write_file(place.store, join_path(place.folder, name), data)
        check_headers(place, output)
        place.commit()
    except BaseException:
        place.abandon()
        raise
