"""Convert a source on disk or in memory: select its tensors, plan the files, and write them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.block_sums import BlockDigester, BlockSums, sums_name
from anyrank.files.listing import Listing
from anyrank.files.progress import progress_of_tool
from anyrank.files.storage import join_path, write_file
from anyrank.models.dialects.registry import values_without_model
from anyrank.models.dialects.transformers.dequantize import check_method
from anyrank.sources.source import Source, list_source
from anyrank.tensors.names import is_of_adapter, is_own_factor
from anyrank.tensors.spec import dtype_name
from anyrank.tools.convert.content import StoredContent
from anyrank.tools.convert.copies import companions
from anyrank.tools.convert.destination import STORE, Destination, destination
from anyrank.tools.convert.file_names import as_files, configuration
from anyrank.tools.convert.formats import OUTPUTS
from anyrank.tools.convert.options import ConvertOptions
from anyrank.tools.convert.output import Contents, Output
from anyrank.tools.convert.report import ConvertReport
from anyrank.tools.convert.selection import Selection, outputs_of, select
from anyrank.tools.convert.writing import write
from anyrank.wording import alternatives, count

STEMS = ("diffusion_pytorch_model",)


def convert_stored(
    src: Source, dst: str | os.PathLike[str], options: ConvertOptions, model: nn.Module | None
) -> ConvertReport:
    """Convert anything but a live model, as `convert` does."""
    start = time.perf_counter()
    target = destination(dst, _paths(src), options.is_file(dst), options.overwrite)
    listing = list_source(src)
    if options.cast_dtype is not None:
        listing = values_without_model(listing)
        check_method(listing)
    selection = _selected(listing, options, model)
    small: dict[str, bytes] = {}
    if options.format.has_configuration and not target.is_file:
        small = {} if model is None else configuration(model, options.cast_dtype)
        small |= companions(_base_of(src), listing, options.cast_dtype)
    report = convert_listing(listing, selection, target, options, small=small)
    return replace(
        report,
        source=_name_of(src, listing),
        copied=[*small],
        seconds=time.perf_counter() - start,
    )


def convert_listing(
    listing: Listing,
    selection: Selection,
    target: Destination,
    options: ConvertOptions,
    *,
    small: Mapping[str, bytes] | None = None,
) -> ConvertReport:
    """Write the selected tensors of a listing.

    Args:
        listing: the source.
        selection: the tensors to write, by their names in the output.
        target: the destination.
        options: the options of the conversion.
        small: name -> bytes of files next to the weights.

    Returns:
        The report, which the caller completes.

    Raises:
        LoadError: the source cannot be read, or the format cannot hold a tensor.
        CheckpointError: the destination cannot be written, or the run is corrupt.
    """
    tensors = outputs_of(listing, selection, options.cast_dtype)
    contents = Contents(
        tensors,
        selection.tied,
        target.name if target.is_file else "",
        _stem(listing, selection),
        options.shard_bytes,
        listing.metadata,
        listing.quantization,
    )
    output = options.format.plan(contents)
    output = replace(output, small={**(small or {}), **output.small})
    content = StoredContent(listing, selection.tensors)
    try:
        content.open()
        replaced = _write(target, output, content, content.reader.check_unchanged)
    finally:
        content.reader.close()
    return ConvertReport(
        source="",
        path=target.path,
        replaced=replaced,
        format=options.to,
        files=output.names,
        tensors=len(tensors),
        nbytes=output.nbytes,
        tied=selection.tied,
        cast={
            tensor.name: f"{kind} -> {dtype_name(tensor.dtype)}"
            for tensor in tensors
            if (kind := listing.kind_of(selection.tensors[tensor.name])) != dtype_name(tensor.dtype)
        },
        renamed=selection.renamed,
        copied=[],
        skipped=list(selection.skipped),
        verified=_verified(listing),
        seconds=0.0,
    )


def _verified(listing: Listing) -> str:
    """Return a text about what is verified while reading: only a run has checksums of blocks."""
    if listing.sums:
        return f"xxh3-64 checksums of {count(len(listing.sums), 'file')} of the source"
    in_memory = any(info.in_memory for info in listing.files)
    return "" if in_memory else "only headers; use anyrank.verify to verify all bytes"


def _selected(listing: Listing, options: ConvertOptions, model: nn.Module | None) -> Selection:
    """Select the tensors to write, under their names in the output."""
    selection = select(listing, options.rename)
    unmerged = [name for name in selection.tensors if is_own_factor(name)]
    if len({is_of_adapter(name) for name in selection.tensors}) > 1:
        raise LoadError(
            "the source has a base and an adapter. Pass one of them; or merge the adapter in a "
            "model (anyrank.integrations.peft.merge, or PEFT's merge_and_unload), and convert that"
        )
    if unmerged and not options.format.keeps_adapters:
        keep_all = alternatives([name for name, row in OUTPUTS.items() if row.keeps_adapters])
        raise LoadError(
            f"{unmerged[0]}: belongs to an adapter that is not merged, so a reader of the folder "
            "would get only the base model. Merge it into the model "
            "(anyrank.integrations.peft.merge); or save only the adapter "
            f"(anyrank.integrations.peft.save); or pass to={keep_all}, which keep all tensors"
        )
    return selection if model is None else as_files(selection, listing, model)


def _paths(src: Source) -> list[str]:
    if isinstance(src, Mapping):
        return []
    return [os.fspath(path) for path in ([src] if isinstance(src, (str, os.PathLike)) else src)]


def _name_of(src: Source, listing: Listing) -> str:
    """Return the source as it was passed; for a run, the step that was read."""
    if isinstance(src, (str, os.PathLike)) and listing.is_run and listing.files:
        return listing.files[0].path.rpartition("/")[0]
    return ", ".join(_paths(src)) or "memory"


def _base_of(src: Source) -> Source:
    """Return the only or first folder, from which configuration and tokenizer are copied."""
    return src if isinstance(src, (Mapping, str, os.PathLike)) else next(iter(src))


def _stem(listing: Listing, selection: Selection) -> str:
    """Return the start of the file names, by which other tools find them."""
    if all(map(is_of_adapter, selection.tensors)):
        return "adapter_model"
    names = [file.path.rsplit("/", 1)[-1] for file in listing.files]
    return next((s for s in STEMS if any(name.startswith(s) for name in names)), "model")


def _write(
    target: Destination, output: Output, content: StoredContent, check_source: Callable[[], None]
) -> str:
    """Write and commit; leave no files if that fails, or if the source has changed meanwhile.

    Returns:
        The result of `Destination.commit`.

    Raises:
        LoadError: the source cannot be read, or has changed.
        CheckpointError: the destination cannot be written, or the run is corrupt.
    """
    try:
        target.prepare(output.nbytes)
        with progress_of_tool("converting", output.nbytes) as progress:
            for file in output.files:
                digester = BlockDigester() if output.has_sums else None
                write(target.folder, file, content, progress, digester)
                if digester is not None:
                    path = join_path(target.folder, sums_name(file.name))
                    write_file(STORE, path, BlockSums(file.size, digester.finish()).to_bytes())
        for name, data in output.small.items():
            write_file(STORE, join_path(target.folder, name), data)
        check_source()
        return target.commit()
    except BaseException:
        target.abandon()
        raise
