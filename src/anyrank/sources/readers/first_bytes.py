"""Recognizes, by their first bytes, files that hold no readable weights: a sentence for each."""

from __future__ import annotations

import io
import re
import zipfile
from contextlib import closing
from dataclasses import dataclass

from anyrank.errors import LoadError
from anyrank.files.storage import Storage, read_range
from anyrank.sources.readers.torch_file import RangeIO, is_head

HEAD_BYTES = 4096
SHOWN_BYTES = 40  # shown of a file of another kind


@dataclass(frozen=True)
class Kind:
    """A kind of file that people take for weights.

    Attributes:
        begins: regex for the beginning of such a file.
        sentence: what it is, and the way out.
    """

    begins: re.Pattern[bytes]
    sentence: str


def _kind(begins: bytes, sentence: str) -> Kind:
    return Kind(re.compile(begins, re.DOTALL | re.IGNORECASE), sentence)


KINDS = (
    _kind(rb"\Z", "is empty (0 bytes): it was not downloaded or copied; do it again"),
    _kind(
        rb"version https://git-lfs",
        "is a Git LFS pointer of a few lines, and not the file: run `git lfs pull` in its folder, "
        "or download the file itself",
    ),
    _kind(
        rb"\s*<(!doctype|html|head|\?xml|error)",
        "is a web page (HTML or XML), a log-in or an error in place of the file: download it again "
        "with access to it",
    ),
    _kind(rb"\0{64}", "is zeros at its beginning: the download was not finished; do it again"),
    _kind(
        rb"GGUF|lmgg|tjgg|fmgg",
        "is a GGUF file (llama.cpp): give the safetensors or torch files that it was made from",
    ),
    _kind(
        rb'\s*\{.{0,4000}"weight_map"',
        "is the index of a folder of shards, and not the weights: give the folder",
    ),
)
SAFETENSORS = "is a safetensors file by its first bytes: give it that ending"
TORCH = "is a file of torch.save by its first bytes: give it the ending .pt"
TORCHSCRIPT = (
    "is a TorchScript archive (torch.jit.save): save the state_dict() of "
    "torch.jit.load(path, map_location='cpu') with torch.save, and give that"
)
ZIP = "is a zip archive, and no file of torch.save: unpack it, and give its contents"
MAX_HEADER_BYTES = 1 << 40  # a larger length of a header is text, or another format's beginning


def what_it_is(storage: Storage, path: str) -> str | None:
    """Say what kind of file this is; None if its first bytes do not tell."""
    try:
        with closing(storage.open(path)) as file:
            size = file.info.size
            head = read_range(file, 0, min(HEAD_BYTES, size))
            if head.startswith(b"PK"):
                return _in_zip(RangeIO(file, 0, size), path)
    except (OSError, LoadError):
        return None
    sentence = next((kind.sentence for kind in KINDS if kind.begins.match(head)), None)
    if sentence is None and head[8:9] == b"{" and not path.endswith(".safetensors"):
        length = int.from_bytes(head[:8], "little")
        return SAFETENSORS if length < size else None
    return sentence or _unknown(head)


def _in_zip(content: io.RawIOBase, path: str) -> str | None:
    """Say what kind of archive this is, by the names in it."""
    try:
        names = {*zipfile.ZipFile(io.BufferedReader(content)).namelist()}
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return None
    if any(re.match(r"[^/]*/?(code/|constants\.pkl)", name) for name in names):
        return TORCHSCRIPT
    if not any(re.fullmatch(r"[^/]*/?data\.pkl", name) for name in names):
        return ZIP
    return TORCH if path.endswith(".safetensors") else None


def _unknown(head: bytes) -> str | None:
    """Show how a file begins that is of no known format; a damaged one has its reader's error."""
    is_header = int.from_bytes(head[:8], "little") < MAX_HEADER_BYTES
    if is_head(head) or is_header or head[8:9] == b"{":
        return None
    return f"is of no format that is read, and begins with {head[:SHOWN_BYTES]!r}: give the weights"
