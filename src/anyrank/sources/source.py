"""The kinds of sources, and the functions that list them.

Formats of files are in `weight_files.py`, and those of folders in `readers/folders.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, storage_for
from anyrank.sources.endings import META_PART, OF_META
from anyrank.sources.locate import locate_all
from anyrank.sources.readers import dcp, huggingface, runs
from anyrank.sources.readers.config_json import CONFIG, with_quantization
from anyrank.sources.readers.folders import DCP, RUN, WEIGHTS, format_of_folder
from anyrank.sources.readers.joining import join
from anyrank.sources.readers.memory import list_memory
from anyrank.sources.weight_files import list_file

Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]


def check_source(source: object) -> None:
    """Check that a source is a path, a list of paths or a dict, before anything is read.

    Raises:
        TypeError: names the type.
        ValueError: it is empty.
    """
    if isinstance(source, Mapping):
        keys: Mapping[object, object] = source
        for key in keys:
            if not isinstance(key, str):
                raise TypeError(
                    f"source={{{key!r}: ...}}: expected names (str) as keys, got "
                    f"{type(key).__name__}"
                )
        if not keys:
            raise ValueError("source={}: the dict is empty; pass a dict of tensors")
        return
    paths: Sequence[object] = [source]
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
        paths = source  # pyright: ignore[reportUnknownVariableType]
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                "source=: expected a path, a list of paths or a dict of tensors, got "
                f"{type(path).__name__}"
            )
    if not paths or "" in paths:
        what = "an empty path" if paths else "an empty list"
        raise WrongValue(f"source= is {what}; pass a path, a list of paths or a dict of tensors")


# Functions that list the weights in a folder, by its kind in FOLDERS of `readers/folders.py`. Other
# kinds are runs of other tools.
LISTERS: dict[str, Callable[[Storage, str], Listing]] = {
    RUN: runs.list_folder,
    DCP: dcp.list_folder,
    WEIGHTS: huggingface.list_folder,
}


def list_source(source: Source) -> Listing:
    """List the tensors of any source with the positions of their bytes; see `list_headers`."""
    return locate_all(list_headers(source))


def list_headers(source: Source) -> Listing:
    """Read the headers of any source: a path or URL, a list of files, or a dict of tensors.

    The positions of tensors of runs are not known yet; `sources/locate.py` finds them.

    Raises:
        LoadError: the path does not exist, cannot be read, or has an unknown format; or files of a
            list contain the same key, are quantized differently, or are shards of a model in Meta's
            format.
        UnsafeFile: a header with impossible sizes, or a pickle that would run code.
    """
    if isinstance(source, Mapping):
        return list_memory(source)
    if isinstance(source, (str, os.PathLike)):
        return _list_path(os.fspath(source))
    paths = [os.fspath(path) for path in source]
    parts = [path for path in paths if META_PART.match(os.path.basename(path))]
    if len(parts) > 1:
        raise LoadError(f"{parts[0]}: is {OF_META}")
    listings = [_list_path(path) for path in paths]
    ways = [
        (path, q) for path, part in zip(paths, listings, strict=True) if (q := part.quantization)
    ]
    for path, quantization in ways:
        if quantization != ways[0][1]:
            raise LoadError(
                f"{path}: its config.json has a different quantization_config than that of "
                f"{ways[0][0]}. Pass files that belong together."
            )
    return join(", ".join(sorted({listing.format for listing in listings})), listings)


def _list_path(path: str) -> Listing:
    storage = storage_for(path)
    try:
        if storage.is_dir(path):
            return _list_folder(storage, path)
        if storage.is_file(path):
            beside = path[: path.rfind("/") + 1] + CONFIG
            return with_quantization(list_file(storage, path), storage, beside)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if os.path.exists(path):
        raise LoadError(f"{path}: is neither a regular file nor a folder")
    raise LoadError(f"{path}: does not exist (working directory {os.getcwd()})")


def _list_folder(storage: Storage, path: str) -> Listing:
    """List the weights in a folder of any kind."""
    name = format_of_folder(storage.names(path))
    if name in LISTERS:
        return LISTERS[name](storage, path)
    from anyrank.sources.foreign.read import list_weights

    return list_weights(name, storage, path)
