"""`anyrank.convert`: write weights of any source as safetensors, DCP or one torch file."""

from __future__ import annotations

import os

import torch
from torch import nn

from anyrank.checks import check_model, check_path
from anyrank.models.dialects.layouts.given import GivenLayout
from anyrank.sources.source import Source, check_source
from anyrank.tensors.names import Rename
from anyrank.tools.convert.format_names import FormatName
from anyrank.tools.convert.live import convert_live
from anyrank.tools.convert.options import ConvertOptions
from anyrank.tools.convert.report import ConvertReport
from anyrank.tools.convert.stored import convert_stored
from anyrank.world.group import Group


def convert(
    src: Source | nn.Module,
    dst: str | os.PathLike[str],
    *,
    to: FormatName = "safetensors",
    dtype: torch.dtype | str | None = None,
    rename: Rename = None,
    shard_bytes: int | None = None,
    model: nn.Module | None = None,
    overwrite: bool = False,
    layout: GivenLayout = None,
    process_group: Group = None,
) -> ConvertReport:
    """Write the weights of a source to a folder or file that other tools read.

    The output is written next to the destination, made durable, and then renamed: the destination
    is complete or absent. Tied tensors are written once. Uses a few MiB of host memory for any
    model size; with `model=`, also the two copies of a tied tensor while they are compared.

    One process converts a source on disk, without other ranks. With a live model, sharded or not,
    the call is collective: every rank of the group must call it. Each rank saves its share to a
    folder next to the destination, which all ranks must see, and the first rank converts that.

    Example::

        torch.save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "w.pt")
        report = anyrank.convert("w.pt", "weights", dtype="bfloat16")
        assert report.files == ["model.safetensors"]
        assert anyrank.inspect("weights").dtypes.keys() == {"bfloat16"}

    Args:
        src: a path or URL, a list of files, or a dict of tensors, as for `load`; for a run, the
            weights of its newest step. Or a model: plain, DDP, FSDP2, tensor parallel, compiled.
        dst: a local path that does not exist yet. It is a file for "torch", and for "safetensors"
            if it ends with `.safetensors`; otherwise a folder.
        to: "safetensors", a Hugging Face folder with the configuration and tokenizer of the
            source's folder; "dcp", for torch.distributed.checkpoint; or "torch", for `torch.load`.
        dtype: dtype for the floating-point tensors: float64, float32, float16 or bfloat16; the
            aliases fp64, fp32, fp16 and bf16 are accepted. Other tensors keep their dtypes.
        rename: maps keys of the source to names: a dict of keys or prefixes, a list of (regex,
            replacement), or a callable. Names that wrappers add (`module.`, `_orig_mod.`) are
            always removed. A tensor whose name becomes "" is left out.
        shard_bytes: maximum bytes of tensors per file, for a folder of safetensors. Default: 5 GB.
        model: for a source that has the names of a live model (a run, DCP, `.pt`), that model, real
            or on meta. The source must hold its tensors. The ties of the model count, and the
            renaming, fusing and stacking of transformers at load time is undone.
        overwrite: whether to rename an existing destination to `dst.replaced-...`, which the report
            names; nothing is deleted. For a link, its target is renamed.
        layout: for a model whose plain tensors are parts of whole tensors, one per rank: a dict
            from name or pattern to (mesh, placements), or a function of the name, as for `sync`.
        process_group: the ranks that hold the model. Default: all ranks, or only this process if no
            group is initialized.

    Returns:
        The report.

    Raises:
        LoadError: the source cannot be read or is corrupt, ranks hold different models, two keys
            get the same name, a value is out of range in `dtype`, the format cannot hold a tensor,
            or an adapter is not plain LoRA or makes a weight that is not finite.
        UnsafeFile: a pickle would run code, or a header has impossible sizes.
        CheckpointError: the destination cannot be written, or does not hold the written bytes; or
            the run is corrupt.
        ValueError, TypeError: an argument is wrong; or the destination is a URL, a pipe, a socket
            or a device, exists already, or is the source itself.
    """

    def checked() -> ConvertOptions:
        options = ConvertOptions(to, dtype, rename, shard_bytes, overwrite, layout)
        path = check_path("dst", dst)
        options.check_name(path)
        if model is not None:
            check_model(model)
        if shard_bytes is not None and options.is_file(path):
            raise ValueError(
                f"shard_bytes= is for a folder of weights, but {path} is one file. Remove it"
            )
        if not isinstance(src, nn.Module):
            check_source(src)
            if layout is not None:
                raise ValueError(
                    "layout= is only for a model; a source on disk has whole tensors. Remove it"
                )
            if process_group is not None:
                raise ValueError(
                    "process_group= is only for a model; one process reads a source on disk. "
                    "Remove it"
                )
        elif model is not None:
            raise ValueError("model= is only for a source on disk, and src is a model. Remove it")
        return options

    # With a process group every rank takes part, even one that passes no model by mistake.
    if isinstance(src, nn.Module) or process_group is not None:
        return convert_live(src, dst, checked, process_group)
    return convert_stored(src, dst, checked(), model)
