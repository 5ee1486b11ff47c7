"""`anyrank.convert`: weights of any source into safetensors, DCP or one torch file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from anyrank.conversion.content import StoredContent
from anyrank.conversion.copies import companions
from anyrank.conversion.destination import Destination, destination
from anyrank.conversion.options import Options, options_of
from anyrank.conversion.report import ConvertReport
from anyrank.conversion.selection import Selection, outputs_of, select
from anyrank.conversion.writing import Sealed, Writer, compare
from anyrank.errors import CheckpointError
from anyrank.files import dcp_output, torch_output
from anyrank.files.formats import Source, check_source, list_source
from anyrank.files.listing import Listing
from anyrank.files.output import Output, OutputTensor
from anyrank.files.safetensors_output import plan_file, plan_folder
from anyrank.files.storage import join_path
from anyrank.files.store import write_file
from anyrank.tensors.names import Rename, renamer

SAFETENSORS = ".safetensors"
METADATA = {"format": "pt"}  # which transformers asks for


def convert(
    src: Source,
    dst: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "dcp", "torch"] = "safetensors",
    dtype: torch.dtype | str | None = None,
    rename: Rename = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> ConvertReport:
    """Write the weights of a source into a folder or file that other tools read.

    The destination is written beside its place, made durable, read again and compared byte by
    byte, and then renamed: it is whole, or it is not there. Tensors that are one tensor (tied) are
    written once. Host memory: a few MiB, at any size. Called by one process.

    Example::

        torch.save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "w.pt")
        report = anyrank.convert("w.pt", "weights", dtype="bfloat16")
        assert report.files == ["model.safetensors"]
        assert anyrank.inspect("weights").dtypes.keys() == {"bfloat16"}

    Args:
        src: a path or URL, a list of files, or a dict of tensors; as for `load`. Of a run, the
            weights of the newest step.
        dst: a path or URL that is not there yet. For "torch", and for "safetensors" if it ends with
            `.safetensors`, it is a file, else a folder.
        to: "safetensors", a Hugging Face folder with the configuration and tokenizer of the
            source's folder; "dcp", for torch.distributed.checkpoint; or "torch", for `torch.load`.
        dtype: of the floating tensors: float64, float32, float16 or bfloat16. Others keep theirs.
        rename: from the source's keys to names: a dict of keys or prefixes, a list of (regex,
            replacement), or a callable. Names that wrappers put in (`module.`, `_orig_mod.`) are
            left out in any case.
        shard_bytes: most bytes of tensors in one file of safetensors. Default: 5 GB.
        overwrite: replace a file, or a folder that holds weights and nothing else.

    Returns:
        The report.

    Raises:
        LoadError: the source cannot be read or is damaged, two keys get one name, a value does not
            exist in `dtype`, or a tensor has no place in the format.
        UnsafeFile: a pickle that would run code, or a header that lies.
        CheckpointError: the destination cannot be written, or does not hold what was written; or a
            damaged run.
        ValueError, TypeError: an argument that is wrong in itself, a destination that is there
            already, or the source itself.
    """
    start = time.perf_counter()
    options = options_of(to, dtype, rename, shard_bytes, overwrite)
    check_source(src)
    is_file = to == "torch" or (to == "safetensors" and os.fspath(dst).endswith(SAFETENSORS))
    place = destination(dst, _paths(src), is_file, options.overwrite)
    listing = list_source(src)
    selection = select(listing, renamer(rename))
    tensors = outputs_of(selection, options.dtype)
    small = companions(src, listing, options.dtype) if not is_file and to == "safetensors" else {}
    output = _plan(place, tensors, selection, options, listing)
    content = StoredContent(listing, selection.tensors)
    try:
        content.open()
        _write(place, Output(output.files, {**small, **output.small}), content)
    finally:
        content.close()
    return ConvertReport(
        source=", ".join(_paths(src)) or "memory",
        path=place.path,
        format=to,
        files=[*(file.name for file in output.files), *output.small, *small],
        tensors=len(tensors),
        nbytes=output.nbytes + sum(map(len, small.values())),
        tied=selection.tied,
        cast={
            tensor.name: f"{_short(selection.tensors[tensor.name].dtype)} -> {_short(tensor.dtype)}"
            for tensor in tensors
            if tensor.dtype != selection.tensors[tensor.name].dtype
        },
        renamed=selection.renamed,
        copied=list(small),
        skipped=list(selection.skipped),
        verified=f"xxh3-64 of {len(output.files)} files, and their headers",
        seconds=time.perf_counter() - start,
    )


def _paths(src: Source) -> list[str]:
    if isinstance(src, Mapping):
        return []
    return [os.fspath(path) for path in ([src] if isinstance(src, (str, os.PathLike)) else src)]


def _plan(
    place: Destination,
    tensors: Sequence[OutputTensor],
    selection: Selection,
    options: Options,
    listing: Listing,
) -> Output:
    if options.to == "dcp":
        return dcp_output.plan_folder(tensors, selection.tied)
    if options.to == "torch":
        return torch_output.plan_file(place.name, tensors, selection.tied)
    metadata = {**listing.metadata, **METADATA, **selection.tied}
    if place.is_file:
        return Output((plan_file(place.name, tensors, metadata),))
    return plan_folder(tensors, metadata, options.shard_bytes, _stem(listing, selection))


def _stem(listing: Listing, selection: Selection) -> str:
    """What the files' names begin with, by which other tools find them."""
    return "model"


def _write(
    place: Destination,
    output: Output,
    content: StoredContent,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write, verify and commit; nothing is left where that fails.

    Raises:
        LoadError: the source cannot be read.
        CheckpointError: the destination cannot be written, or does not hold what was written.
    """
    try:
        place.prepare(output.nbytes)
        writer = Writer(place.store, place.folder, content, check)
        sealed: dict[str, list[Sealed]] = {}
        for file in output.files:
            sealed[file.name] = writer.write(file)
        for name, seals in sealed.items():
            compare(place.store, join_path(place.folder, name), seals, check)
        for name, data in output.small.items():
            write_file(place.store, join_path(place.folder, name), data)
        _check_headers(place, output)
        place.commit()
    except BaseException:
        place.abandon()
        raise


def _check_headers(place: Destination, output: Output) -> None:
    """What was written, as a reader sees it."""
    path = join_path(place.folder, place.name) if place.is_file else place.folder
    found = {name: (t.shape, t.dtype) for name, t in list_source(path).tensors.items()}
    planned = {span.tensor.name: span.tensor for file in output.files for span in file.spans}
    for name, tensor in planned.items():
        if found.get(name) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"{path}: {name} reads as {found.get(name)}, and was written as "
                f"{tensor.shape}, {tensor.dtype}"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
