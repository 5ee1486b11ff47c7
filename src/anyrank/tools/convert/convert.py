"""`anyrank.convert`: weights of any source into safetensors, DCP or one torch file."""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import nn

from anyrank.checks import check_model, check_path
from anyrank.models.dialects.layouts.given import GivenLayout
from anyrank.sources.source import Source, check_source
from anyrank.tensors.names import Rename
from anyrank.tools.convert.live import convert_live
from anyrank.tools.convert.options import ConvertOptions
from anyrank.tools.convert.report import ConvertReport
from anyrank.tools.convert.stored import convert_stored
from anyrank.world.group import Group


def convert(
    src: Source | nn.Module,
    dst: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "dcp", "torch"] = "safetensors",
    dtype: torch.dtype | str | None = None,
    rename: Rename = None,
    shard_bytes: int | None = None,
    model: nn.Module | None = None,
    overwrite: bool = False,
    layout: GivenLayout = None,
    process_group: Group = None,
) -> ConvertReport:
    """Write the weights of a source into a folder or file that other tools read.

    The destination is written beside its final place, made durable, and then renamed: it is either
    whole or absent. Tied tensors are written once. Host memory: a few MiB, at any size; with
    `model=`, both copies of a tensor that the model ties, which are compared.

    One process converts a source on disk, without other ranks. A live model is given by every rank
    of its group, sharded or not: each saves its share into a folder beside the destination, which
    all of them must see, and the first rank converts that.

    Example::

        torch.save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "w.pt")
        report = anyrank.convert("w.pt", "weights", dtype="bfloat16")
        assert report.files == ["model.safetensors"]
        assert anyrank.inspect("weights").dtypes.keys() == {"bfloat16"}

    Args:
        src: a path or URL, a list of files, or a dict of tensors; as for `load`. For a run, the
            newest step's weights. Or a model: plain, DDP, FSDP2, tensor parallel, compiled.
        dst: a local path that does not exist yet. It is a file for "torch", and for "safetensors"
            if it ends with `.safetensors`, else a folder.
        to: "safetensors", a Hugging Face folder with the configuration and tokenizer of the
            source's folder; "dcp", for torch.distributed.checkpoint; or "torch", for `torch.load`.
        dtype: dtype of the floating tensors: float64, float32, float16 or bfloat16, also as fp64,
            fp32, fp16 or bf16. Other tensors keep theirs.
        rename: from the source's keys to names: a dict of keys or prefixes, a list of (regex,
            replacement), or a callable. Names that wrappers add (`module.`, `_orig_mod.`) are
            always left out, and so is a key that becomes "".
        shard_bytes: most bytes of tensors in one file of safetensors. Default: 5 GB.
        model: for a source with a model's own names (a run, DCP, `.pt`): that model, real or on
            meta. The source must hold its tensors, ties are those of the model, and transformers'
            renaming, fusing and stacking at load time is undone.
        overwrite: rename an existing destination to `dst.replaced-...`, which the report names;
            nothing is deleted. For a link, its target is renamed.
        layout: for a model whose plain tensors are each rank's part of a whole: a dict of name or
            pattern to (mesh, placements), or a function of the name, as for `sync`.
        process_group: the ranks that hold the model. Default: all, or this process alone if no
            group is initialized.

    Returns:
        The report.

    Raises:
        LoadError: the source cannot be read or is damaged, ranks hold different models, two keys
            get one name, a value does not exist in `dtype`, the format cannot hold a tensor, or an
            adapter is not plain LoRA or makes a weight that is not finite.
        UnsafeFile: a pickle that would run code, or a header that lies.
        CheckpointError: the destination cannot be written, or does not hold the written bytes; or
            the run is damaged.
        ValueError, TypeError: an argument that is wrong in itself; a destination that is a URL, a
            pipe, a socket or a device, that exists already, or that is the source itself.
    """

    def checked() -> ConvertOptions:
        options = ConvertOptions(to, dtype, rename, shard_bytes, overwrite, layout)
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
        elif model is not None:
            raise ValueError("model= is for sources on disk: src is a model already")
        return options

    # With a process group every rank takes part, even one that gives no model by mistake.
    if isinstance(src, nn.Module) or process_group is not None:
        return convert_live(src, dst, checked, process_group)
    return convert_stored(src, dst, checked(), model)
