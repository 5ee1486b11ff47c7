"""Which format a source is in.

A new format of folders is a new file, and a line in FOLDERS and in LISTERS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import (
    EXTRA_STATE,
    FileInfo,
    Listing,
    extra_of,
    join,
)
from anyrank.files.manifest import MANIFEST, STEP
from anyrank.files.storage import BLOCK_BYTES, Storage, fingerprint, storage_for
from anyrank.files.threads import spread
from anyrank.formats import run_folder, weight_files
from anyrank.formats.run_folder import METADATA
from anyrank.tensors.box import Box
from anyrank.tensors.names import NESTED
from anyrank.tensors.spec import Chunk, StoredTensor

FINGERPRINT_THREADS = 8
Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]


# What writes folders -> the rows of which one is there whole: each pattern is an entry's name. In
# the order in which they are looked for. The core lists the weights of those in LISTERS;
# `foreign.read` has the others, and the runs of every tool but anyrank.
RUN, DCP, WEIGHTS = "anyrank", "dcp", "weights"
FOLDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    RUN: ((re.escape(MANIFEST),), (STEP.pattern,), (re.escape(run_folder.ASIDE) + ".*",)),
    "trainer": ((r"trainer_state\.json",),),
    "accelerate": ((r"random_states_\d+\.pkl",), (r"pytorch_model_fsdp(_\d+)?(\.bin)?",)),
    "deepspeed": (
        (r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt",),
        (r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt",),
        ("latest", "global_step.*"),
    ),
    "verl": ((r"model_world_size_\d+_rank_\d+\.pt",),),
    "torch_checkpointing": ((r"model_0\.pt",), (r"metadata\.pkl", r"\w+?_\d+\.pt")),
    "megatron": ((re.escape(METADATA), r"common\.pt"),),
    DCP: ((re.escape(METADATA),),),
    WEIGHTS: ((),),
}


def _list_dcp(storage: Storage, folder: str) -> Listing:
    from anyrank.around.readers.dcp import list_folder  # a door: see test_house

    return list_folder(storage, folder)


def _list_weights(storage: Storage, folder: str) -> Listing:
    from anyrank.around.readers.huggingface import list_folder  # a door

    return list_folder(storage, folder)


LISTERS: dict[str, Callable[[Storage, str], Listing]] = {
    RUN: run_folder.list_folder,
    DCP: _list_dcp,
    WEIGHTS: _list_weights,
}


def looks_like(name: str, names: Sequence[str]) -> bool:
    """Whether a folder with these entries is of the format of this name in FOLDERS."""
    return any(
        all(any(re.fullmatch(pattern, entry) for entry in names) for pattern in row)
        for row in FOLDERS[name]
    )


def format_of_folder(names: Sequence[str]) -> str:
    """The name in FOLDERS of what wrote a folder with these entries."""
    return next(name for name in FOLDERS if looks_like(name, names))


def is_of_tool(names: Sequence[str]) -> bool:
    """Whether a folder with these entries is a checkpoint of another tool, to go on from."""
    return format_of_folder(names) not in (RUN, WEIGHTS)


def checkpoint_among(names: Sequence[str]) -> str | None:
    """What checkpoint a folder with these entries holds, by their names alone; None for none."""
    if METADATA in names or any(name.endswith(".distcp") for name in names):
        return "a torch.distributed.checkpoint folder"
    return next(
        (name for name in sorted(names) if name.lower().endswith(weight_files.ENDINGS)), None
    )


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
        raise WrongValue(f"source= is {what}: give a path, a list of paths or a dict of tensors")


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
    paths = [os.fspath(path) for path in source]
    parts = [path for path in paths if weight_files.META_PART.match(os.path.basename(path))]
    if len(parts) > 1:
        raise LoadError(f"{parts[0]}: is {weight_files.OF_META}")
    listings = [_list_path(path) for path in paths]
    return join(", ".join(sorted({listing.format for listing in listings})), listings)


def with_fingerprints(listing: Listing) -> Listing:
    """The listing, by which ranks with other copies of its local files know them.

    It takes two reads a file and one a tensor, so it is for ranks that see files in other places.
    """
    files, blocks = [*listing.files], _blocks_of(listing)
    local = (number for number, info in enumerate(files) if info.location)

    def add(number: int) -> None:
        info = replace(files[number], blocks=tuple(sorted(blocks.get(number, ()))))
        files[number] = replace(info, fingerprint=fingerprint(info))

    spread(local, [add] * min(FINGERPRINT_THREADS, len(files) or 1))
    return replace(listing, files=tuple(files))


def _blocks_of(listing: Listing) -> dict[int, set[int]]:
    """File -> where a block begins in the middle of each tensor; of one in pieces, in one of them.

    The middle differs where a tensor does, more likely than its start: embeddings begin with rows
    that are never trained.
    """
    blocks: dict[int, set[int]] = {}
    for number, stored in enumerate([*listing.tensors.values(), *listing.beside.values()]):
        if stored.numel:
            chunk = stored.chunks[number % len(stored.chunks)]
            middle = chunk.box.numel * stored.dtype.itemsize // 2
            start = chunk.offset + max(0, middle - BLOCK_BYTES // 2)
            blocks.setdefault(chunk.file, set()).add(start)
    return blocks


def _list_path(path: str) -> Listing:
    storage = storage_for(path)
    try:
        if storage.is_dir(path):
            return _list_folder(storage, path)
        if storage.is_file(path):
            return weight_files.list_file(storage, path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if os.path.exists(path):
        raise LoadError(f"{path}: is neither a regular file nor a folder")
    raise LoadError(f"{path}: does not exist (working directory {os.getcwd()})")


def _list_folder(storage: Storage, path: str) -> Listing:
    name = format_of_folder(storage.names(path))
    if name in LISTERS:
        return LISTERS[name](storage, path)
    from anyrank.around.foreign.read import list_weights  # around the core: a door in test_house

    return list_weights(name, storage, path)


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
        memory = (value.device, value.data_ptr(), value.dtype, shape, value.stride())
        if memory in first and value.numel():  # tied
            stored[key] = first[memory].renamed(key)
            continue
        chunk = Chunk(Box.whole(shape), len(files), 0, tuple(value.stride()))
        stored[key] = first[memory] = StoredTensor(key, shape, value.dtype, (chunk,))
        nbytes = value.numel() * value.element_size()
        files.append(FileInfo(key, nbytes, "", in_memory=True, tensor=value.detach()))
    return Listing("memory", tuple(files), stored, skipped=tuple(skipped), extras=extras)
