"""Recognizes files without readable weights by their first bytes, with a sentence for each."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from anyrank.errors import LoadError
from anyrank.files.storage import Storage, read_range
from anyrank.sources import safetensors
from anyrank.sources.readers.torch_file import RangeIO

HEAD_BYTES = 4096
SHOWN_BYTES = 40  # shown of a file of an unknown kind


@dataclass(frozen=True)
class Kind:
    """A kind of file that users mistake for weights.

    Attributes:
        begins: regex for the first bytes of such a file.
        sentence: what the file is, and the way out.
    """

    begins: re.Pattern[bytes]
    sentence: str


def _kind(begins: bytes, sentence: str) -> Kind:
    return Kind(re.compile(begins, re.DOTALL | re.IGNORECASE), sentence)


KINDS = (
    _kind(rb"\Z", "is empty (0 bytes); download or copy it again"),
    _kind(
        rb"version https://git-lfs",
        "is a Git LFS pointer, not the file. Run `git lfs pull` in its folder, or download the "
        "file itself.",
    ),
    _kind(
        rb"\s*<(!doctype|html|head|\?xml|error)",
        "is a web page (HTML or XML: a login or error page), not the file. Download it again "
        "with access to it.",
    ),
    _kind(rb"\0{64}", "starts with zeros, because the download is incomplete; download it again"),
    _kind(
        rb"GGUF|lmgg|tjgg|fmgg",
        "is a GGUF file (llama.cpp); pass the safetensors or torch files from which it was made",
    ),
    _kind(
        rb'\s*\{.{0,4000}"weight_map"',
        "is the index of a folder of shards, not the weights; pass the folder",
    ),
)
SAFETENSORS = "is a safetensors file by its first bytes; rename it to end in .safetensors"
TORCH = "is a torch.save file by its first bytes; rename it to end in .pt"
TORCHSCRIPT = (
    "is a TorchScript archive (torch.jit.save). Save the state_dict() of torch.jit.load(path, "
    "map_location='cpu') with torch.save, and pass that file."
)
ZIP = "is a zip archive, but not a torch.save file; unpack it, and pass its contents"
LENGTH_LIMIT = 1 << 40  # a larger length of a header is text, or the start of a different format


def describe_file(storage: Storage, path: str, is_head: Callable[[bytes], bool]) -> str | None:
    """Return the error text for the kind of a file; None if its first bytes do not show it.

    Args:
        storage: where the file is.
        path: its path.
        is_head: returns whether a file that starts with these bytes has a known format, whose
            reader reports what is wrong.
    """
    try:
        with closing(storage.open(path)) as file:
            size = file.info.size
            head = read_range(file, 0, min(HEAD_BYTES, size))
            if head.startswith(b"PK"):
                return _in_zip(RangeIO(file, 0, size), path)
    except (OSError, LoadError):
        return None
    sentence = next((kind.sentence for kind in KINDS if kind.begins.match(head)), None)
    if sentence is None and safetensors.is_head(head) and not path.endswith(".safetensors"):
        length = int.from_bytes(head[:8], "little")
        return SAFETENSORS if length < size else None
    # A safetensors file may be corrupt after the length of its header.
    is_known = is_head(head) or int.from_bytes(head[:8], "little") < LENGTH_LIMIT
    if sentence is None and not is_known:
        start = head[:SHOWN_BYTES]
        return f"has an unknown format (it starts with {start!r}); pass a file with weights"
    return sentence


def _in_zip(content: io.RawIOBase, path: str) -> str | None:
    """Return the error text for the kind of an archive, from the names in it."""
    try:
        names = {*zipfile.ZipFile(io.BufferedReader(content)).namelist()}
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return None
    if any(re.match(r"[^/]*/?(code/|constants\.pkl)", name) for name in names):
        return TORCHSCRIPT
    if not any(re.fullmatch(r"[^/]*/?data\.pkl", name) for name in names):
        return ZIP
    return TORCH if path.endswith(".safetensors") else None
