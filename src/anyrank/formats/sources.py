"""Which format a source is in.

A new format of folders is a row of FOLDERS and of LISTED_BY_READERS here, and one of LISTERS where
it is read; another tool's run one of FOLDERS here, and of RUNS in `around/foreign/read.py`. Formats
of files are in `weight_files.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import Listing
from anyrank.files.manifest import MANIFEST, STEP
from anyrank.files.storage import Storage, storage_for
from anyrank.formats import weight_files
from anyrank.formats.run_step import ASIDE, METADATA

Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]


# What writes folders -> rows of patterns. A folder is of a kind if some entry fits each pattern of
# one of its rows; kinds are tried in this order, and the empty row of WEIGHTS fits every folder.
# `around/readers` lists the weights of LISTED_BY_READERS; `foreign.read` has the others, which are
# the runs of other tools.
RUN, DCP, WEIGHTS = "anyrank", "dcp", "weights"
LISTED_BY_READERS = (RUN, DCP, WEIGHTS)
FOLDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    RUN: ((re.escape(MANIFEST),), (STEP.pattern,), (re.escape(ASIDE) + ".*",)),
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


def is_run_of_tool(name: str) -> bool:
    """Whether a name in FOLDERS is of the runs of another tool."""
    return name not in LISTED_BY_READERS


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
        from anyrank.around.readers.memory import list_memory  # a door

        return list_memory(source)
    if isinstance(source, (str, os.PathLike)):
        return _list_path(os.fspath(source))
    from anyrank.around.readers.joining import list_files  # a door

    return list_files(source)


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
    if not is_run_of_tool(name):
        from anyrank.around.readers.listers import list_as  # a door: see test_house

        return list_as(name, storage, path)
    from anyrank.around.foreign.read import list_weights  # a door

    return list_weights(name, storage, path)
