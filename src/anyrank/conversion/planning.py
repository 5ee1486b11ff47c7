"""The files of an output, by format, and what must hold of them once they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyrank.conversion.destination import Destination
from anyrank.conversion.options import ConvertOptions
from anyrank.errors import CheckpointError
from anyrank.files.output import Output, OutputTensor
from anyrank.files.storage import join_path
from anyrank.formats import dcp_output, torch_output
from anyrank.formats.safetensors_output import plan_file, plan_folder
from anyrank.formats.sources import list_source

FORMAT = {"format": "pt"}  # which transformers asks for


def plan_output(
    place: Destination,
    tensors: Sequence[OutputTensor],
    tied: Mapping[str, str],
    options: ConvertOptions,
    *,
    metadata: Mapping[str, str],
    stem: str = "model",
) -> Output:
    """What to write.

    Args:
        place: where to.
        tensors: what.
        tied: name -> the name whose bytes it shares.
        options: the format, and the size of its files.
        metadata: free text for safetensors.
        stem: what the names of safetensors files begin with.

    Raises:
        LoadError: a tensor that has no place in the format.
    """
    if options.to == "dcp":
        return dcp_output.plan_folder(tensors, tied)
    if options.to == "torch":
        return torch_output.plan_file(place.name, tensors, tied)
    texts = {**metadata, **FORMAT, **tied}
    if place.is_file:
        return Output((plan_file(place.name, tensors, texts),))
    return plan_folder(tensors, texts, options.shard_bytes, stem)


def check_headers(place: Destination, output: Output) -> None:
    """What was written, as a reader sees it.

    Raises:
        CheckpointError: a tensor is not there, or is another.
    """
    path = join_path(place.folder, place.name) if place.is_file else place.folder
    found = {name: (t.shape, t.dtype) for name, t in list_source(path).tensors.items()}
    planned = {span.tensor.name: span.tensor for file in output.files for span in file.spans}
    for name, tensor in planned.items():
        if found.get(name) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"{path}: {name} reads as {found.get(name)}, and was written as "
                f"{tensor.shape}, {tensor.dtype}"
            )
