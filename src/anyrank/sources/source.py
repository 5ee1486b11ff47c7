"""What a source is, and what lists it.

Formats of files are in `weight_files.py`; those of folders, of dicts and of lists of files are the
readers'.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import Listing
from anyrank.files.storage import storage_for
from anyrank.sources import weight_files

Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]


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
        from anyrank.sources.readers.memory import list_memory  # a door

        return list_memory(source)
    if isinstance(source, (str, os.PathLike)):
        return _list_path(os.fspath(source))
    from anyrank.sources.readers.joining import list_files  # a door

    return list_files(source)


def _list_path(path: str) -> Listing:
    storage = storage_for(path)
    try:
        if storage.is_dir(path):
            from anyrank.sources.readers.listers import list_as  # a door: see test_house

            return list_as("folder", storage, path)
        if storage.is_file(path):
            return weight_files.list_file(storage, path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if os.path.exists(path):
        raise LoadError(f"{path}: is neither a regular file nor a folder")
    raise LoadError(f"{path}: does not exist (working directory {os.getcwd()})")
