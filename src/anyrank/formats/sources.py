"""Which format a source is in. A new format is a new file here and a line in a table below."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import (
    EXTRA_STATE,
    FileInfo,
    Listing,
    extra_of,
    join,
    versions_of,
)
from anyrank.files.storage import Storage, digest_of_ends, read_range, storage_for
from anyrank.formats import dcp, huggingface, run_folder, safetensors, torch_file
from anyrank.formats.tools import accelerate, deepspeed, megatron, per_rank, tables, trainer
from anyrank.formats.tools.foreign import ForeignCheckpoint
from anyrank.tensors.box import Box
from anyrank.tensors.names import NESTED
from anyrank.tensors.spec import Chunk, StoredTensor

Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class FolderFormat:
    """What writes folders.

    Attributes:
        sign: whether a folder with these entries is one.
        weights: what lists its weights.
        run: what reads a whole run of another tool, to go on from; None where there is none.
    """

    sign: Callable[[list[str]], bool]
    weights: Callable[[Storage, str], Listing]
    run: Callable[[Storage, str], ForeignCheckpoint] | None = None


# In order of their signs; the last one takes what is left.
FOLDERS = (
    FolderFormat(run_folder.recognises, run_folder.list_folder),
    FolderFormat(trainer.recognises, accelerate.list_folder, trainer.read),
    FolderFormat(accelerate.recognises, accelerate.list_folder, accelerate.read),
    FolderFormat(deepspeed.recognises, accelerate.list_folder, deepspeed.read),
    FolderFormat(per_rank.is_verl, per_rank.list_folder, per_rank.read_verl),
    FolderFormat(
        per_rank.is_torch_checkpointing, per_rank.list_folder, per_rank.read_torch_checkpointing
    ),
    FolderFormat(megatron.recognises, megatron.list_folder, megatron.read),
    FolderFormat(lambda names: dcp.METADATA in names, dcp.list_folder, tables.read_dcp),
    FolderFormat(lambda names: True, huggingface.list_folder),
)

# File formats by ending; files with another ending are recognised by their first bytes.
FILES: dict[str, Callable[[Storage, str], Listing]] = {
    ".safetensors": safetensors.list_file,
    ".pt": torch_file.list_file,
    ".pth": torch_file.list_file,
    ".bin": torch_file.list_file,
    ".ckpt": torch_file.list_file,
}

ENDINGS = (*FILES, ".safetensors.index.json", ".bin.index.json")


def checkpoint_among(names: Sequence[str]) -> str | None:
    """What checkpoint a folder with these entries holds, by their names alone; None for none."""
    if dcp.METADATA in names or any(name.endswith(".distcp") for name in names):
        return "a torch.distributed.checkpoint folder"
    return next((name for name in sorted(names) if name.lower().endswith(ENDINGS)), None)


def check_source(source: object) -> None:
    """Refuse what names no weights, before anything is read.

    Raises:
        TypeError: names the type.
        ValueError: it is empty.
    """
    if isinstance(source, Mapping):
        keys: Mapping[object, object] = source
        for key in keys:
            if not isinstance(key, str):
                raise TypeError(f"the keys of source= are names, str, not {key!r}")
        if not keys:
            raise ValueError("source= is an empty dict: give the dict of weights")
        return
    paths: Sequence[object] = [source]
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
        paths = source  # pyright: ignore[reportUnknownVariableType]
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                "source= takes a path, a list of paths, or a dict of tensors, not "
                f"{type(path).__name__}"
            )
    if not paths or "" in paths:
        what = "an empty path" if paths else "an empty list"
        raise ValueError(f"source= is {what}: give a path, a list of paths or a dict of tensors")


def list_source(source: Source) -> Listing:
    """Headers of any source: a path or URL, a list of files, or a dict of tensors in memory.

    Raises:
        LoadError: nothing there, no permission, or no format that anyrank knows.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    if isinstance(source, Mapping):
        return list_memory(source)
    if isinstance(source, (str, os.PathLike)):
        return _list_path(os.fspath(source))
    listings = [_list_path(os.fspath(path)) for path in source]
    return join(", ".join(sorted({listing.format for listing in listings})), listings)


def with_ends(listing: Listing) -> Listing:
    """The listing, by which other ranks know their own copies of its local files.

    It takes two reads a file, so what one process reads goes without.
    """
    return replace(listing, files=tuple(map(_file_with_ends, listing.files)))


def _file_with_ends(info: FileInfo) -> FileInfo:
    if not info.place:
        return info
    try:
        with closing(storage_for(info.path).open(info.path)) as file:
            return replace(info, ends=digest_of_ends(file, info))
    except OSError as error:
        raise LoadError(f"{info.path}: cannot be read: {error}") from error


def _list_path(path: str) -> Listing:
    storage = storage_for(path)
    try:
        if storage.is_dir(path):
            names = storage.names(path)
            return next(each for each in FOLDERS if each.sign(names)).weights(storage, path)
        if storage.is_file(path):
            return _file_lister(storage, path)(storage, path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if os.path.exists(path):
        raise LoadError(f"{path}: is neither a regular file nor a folder")
    raise LoadError(f"{path}: does not exist (working directory {os.getcwd()})")


def _file_lister(storage: Storage, path: str) -> Callable[[Storage, str], Listing]:
    lister = FILES.get(os.path.splitext(path)[1].lower())
    if lister is not None:
        return lister
    with closing(storage.open(path)) as file:
        head = read_range(file, path, 0, min(9, storage.info(path).size))
    if head[:4] == torch_file.ZIP_MAGIC or head[:1] == b"\x80":
        return torch_file.list_file
    if head[8:9] == b"{":
        return safetensors.list_file
    raise LoadError(f"{path}: unknown format; anyrank reads {', '.join(FILES)} and folders of them")


def _tensors_in(value: Any) -> int:
    inner: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    return sum(isinstance(tensor, torch.Tensor) for tensor in inner.values())


def list_memory(tensors: Mapping[str, Any]) -> Listing:
    """A dict of tensors in memory: each tensor is a "file" whose bytes are its storage.

    Raises:
        LoadError: a value is not a plain dense tensor.
        ValueError: there are no tensors, or they are in an inner dict.
    """
    files: list[FileInfo] = []
    stored: dict[str, StoredTensor] = {}
    skipped: list[str] = []
    extras: dict[str, tuple[Any] | None] = {}
    first: dict[Any, StoredTensor] = {}  # by memory
    direct = sum(isinstance(value, torch.Tensor) for value in tensors.values())
    inner = next((name for name in NESTED if _tensors_in(tensors.get(name)) > direct), None)
    if inner is not None or not direct:
        if inner is None:
            keys = ", ".join(map(str, list(tensors)[:20]))
            raise WrongValue(
                f"the dict {f'holds no tensors, only {keys}' if keys else 'is empty'}: give the "
                "dict of weights"
            )
        raise WrongValue(
            "the dict holds the weights in an inner dict: give the inner one, for instance "
            f"source[{inner!r}]"
        )
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            if key.rsplit(".", 1)[-1] == EXTRA_STATE:
                extras[key] = extra_of(value)
            else:
                skipped.append(f"{key}: not a tensor")
            continue
        wraps = hasattr(type(value), "__tensor_flatten__")  # its bytes are in other tensors
        if value.layout != torch.strided or wraps or value.is_meta or value.is_quantized:
            raise LoadError(
                f"{key}: a {type(value).__name__} of {value.dtype}, layout {value.layout}, on "
                f"{value.device} has no bytes that anyrank can read here: give plain tensors; a "
                "dict of DTensors goes into a model by anyrank.load or anyrank.sync"
            )
        shape = tuple(value.shape)
        place = (value.device, value.data_ptr(), value.dtype, shape, value.stride())
        if place in first and value.numel():  # tied
            stored[key] = first[place].renamed(key)
            continue
        chunk = Chunk(Box.whole(shape), len(files), 0, tuple(value.stride()))
        stored[key] = first[place] = StoredTensor(key, shape, value.dtype, (chunk,))
        nbytes = value.numel() * value.element_size()
        files.append(FileInfo(key, nbytes, "", in_memory=True, tensor=value.detach()))
    made = Listing("memory", tuple(files), stored, skipped=tuple(skipped), extras=extras)
    return replace(made, versions=versions_of(tensors))
