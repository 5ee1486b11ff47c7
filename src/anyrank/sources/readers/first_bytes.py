"""Recognises, by their first bytes, files that hold no readable weights: a sentence for each."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from anyrank.errors import LoadError
from anyrank.files.storage import Storage, read_range
from anyrank.sources.readers.torch_file import RangeIO

HEAD_BYTES = 4096
SHOWN_BYTES = 80  # shown of a text
UNPACK = "unpack it, and give its contents"


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
        rb"\x93NUMPY",
        "is a NumPy array: read it with numpy.load, and give a dict of torch.from_numpy(...)",
    ),
    _kind(
        rb"\x89HDF\r\n",
        "is an HDF5 file (Keras, h5py): read it with its library, and give a dict of tensors",
    ),
    _kind(
        rb'\s*\{.{0,4000}"weight_map"',
        "is the index of a folder of shards, and not the weights: give the folder",
    ),
    _kind(rb"\x1f\x8b", f"is a gzip archive: {UNPACK}"),
    _kind(rb"BZh\d", f"is a bzip2 archive: {UNPACK}"),
    _kind(rb"\xfd7zXZ\0", f"is an xz archive: {UNPACK}"),
    _kind(rb"\x28\xb5\x2f\xfd", f"is a zstd archive: {UNPACK}"),
    _kind(rb"7z\xbc\xaf|Rar!", f"is an archive (7z or rar): {UNPACK}"),
    _kind(rb".{257}ustar", f"is a tar archive: {UNPACK}"),
    _kind(rb".{4}TFL3", "is a TensorFlow Lite model, which is not read"),
    _kind(
        rb"model_checkpoint_path:",
        "is TensorFlow's note of its checkpoints: convert them with the library that made them",
    ),
    _kind(
        rb"\x08.{1,40}(pytorch|onnx|tf2onnx|keras2onnx)",
        "is an ONNX model: give the weights that it was exported from",
    ),
    _kind(
        rb"[\x81-\x8f\xde\xdf].{0,4}[\xa1-\xbf\xd9]",
        "is msgpack (Flax): load it with Flax, and give a dict of tensors",
    ),
    _kind(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "is a picture or a sound, and no weights"),
    _kind(rb"%PDF", "is a PDF document, and no weights"),
    _kind(rb"\x7fELF|MZ\x90", "is a program, and no weights"),
    _kind(
        rb"\x80(?!.\x8a\nl\xfc\x9c).{1,4000}(numpy[^\n]{0,20}multiarray|numpy\n)",
        "is a pickle of NumPy arrays, and no file of torch.save: read it with pickle if you trust "
        "it, and give a dict of torch.from_numpy(...)",
    ),
)
SAFETENSORS = "is a safetensors file by its first bytes: give it that ending"
TORCH = "is a file of torch.save by its first bytes: give it the ending .pt"
IN_ZIP: tuple[tuple[Callable[[set[str]], bool], str], ...] = (
    (
        lambda names: any(re.match(r"[^/]*/?(code/|constants\.pkl)", name) for name in names),
        "is a TorchScript archive (torch.jit.save): save the state_dict() of "
        "torch.jit.load(path, map_location='cpu') with torch.save, and give that",
    ),
    (
        lambda names: any(name.endswith(".npy") for name in names),
        "is an archive of NumPy arrays (.npz): read it with numpy.load, and give a dict of "
        "torch.from_numpy(...)",
    ),
    (
        lambda names: any(name.endswith(".h5") for name in names),
        "is a Keras model: load it with Keras, and give a dict of tensors",
    ),
    (
        lambda names: not any(re.fullmatch(r"[^/]*/?data\.pkl", name) for name in names),
        f"is a zip archive, and no file of torch.save: {UNPACK}",
    ),
)


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
    return sentence or _text(head)


def _in_zip(content: io.RawIOBase, path: str) -> str | None:
    """Say what kind of archive this is, by the names in it."""
    try:
        names = {*zipfile.ZipFile(io.BufferedReader(content)).namelist()}
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return None
    sentence = next((sentence for is_kind, sentence in IN_ZIP if is_kind(names)), None)
    return sentence or (TORCH if path.endswith(".safetensors") else None)


def _text(head: bytes) -> str | None:
    """Describe a text in place of weights, with its beginning: most often a server's error."""
    try:
        text = head[:SHOWN_BYTES].decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    if not text or not all(letter.isprintable() or letter.isspace() for letter in text):
        return None
    kind = "JSON" if text.startswith(("{", "[")) else "text"
    return f"is {kind} and no weights; it begins with {text!r}: check the download"
