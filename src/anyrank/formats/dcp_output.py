"""What a folder of torch.distributed.checkpoint is to hold: one data file, and `.metadata`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyrank.files.output import FileSpan, Output, OutputFile, OutputTensor
from anyrank.formats.dcp import METADATA
from anyrank.formats.dcp_metadata import metadata_of
from anyrank.formats.run_folder import SavedBox
from anyrank.formats.torch_zip import ALIGN, wrap
from anyrank.tensors.box import Box
from anyrank.tensors.writes import PIECE_BYTES

DATA = "__0_0.distcp"


def plan_folder(tensors: Sequence[OutputTensor], tied: Mapping[str, str]) -> Output:
    """A DCP folder of a flat dict of tensors; tied names point at the same bytes."""
    fixed: list[tuple[int, bytes]] = []
    spans: list[FileSpan] = []
    places: list[SavedBox] = []
    position = 0
    for tensor in tensors:
        for box in Box.whole(tensor.shape).cut(PIECE_BYTES // tensor.dtype.itemsize):
            nbytes = box.numel * tensor.dtype.itemsize
            head, tail = wrap(nbytes, box.sizes, tensor.dtype)
            start, length = position + len(head), len(head) + nbytes + len(tail)
            what = (tensor.name, tensor.shape, tensor.dtype, box)
            places.append(SavedBox(*what, DATA, start, position, length))
            padding = bytes(-length % ALIGN)
            fixed += [(position, head), (start + nbytes, tail + padding)]
            spans.append(FileSpan(tensor, box, start))
            position += length + len(padding)
    file = OutputFile(DATA, position, tuple(fixed), tuple(spans))
    return Output((file,), {METADATA: metadata_of(places, tied, by_part=False)}, has_sums=True)
