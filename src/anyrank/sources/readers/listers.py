"""The formats that the core does not list by itself, each by the module that reads its headers."""

from __future__ import annotations

from collections.abc import Callable

from anyrank.files.listing import Listing
from anyrank.files.storage import Storage
from anyrank.sources.readers.folders import format_of_folder, is_run_of_tool


def _torch_file(storage: Storage, path: str) -> Listing:
    from anyrank.sources.readers.torch_file import list_file

    return list_file(storage, path)


def _run_folder(storage: Storage, folder: str) -> Listing:
    from anyrank.sources.readers.runs import list_folder

    return list_folder(storage, folder)


def _dcp_folder(storage: Storage, folder: str) -> Listing:
    from anyrank.sources.readers.dcp import list_folder

    return list_folder(storage, folder)


def _folder_of_weights(storage: Storage, folder: str) -> Listing:
    from anyrank.sources.readers.huggingface import list_folder

    return list_folder(storage, folder)


def _folder(storage: Storage, path: str) -> Listing:
    """The weights in a folder, whatever wrote it."""
    name = format_of_folder(storage.names(path))
    if not is_run_of_tool(name):
        return list_as(name, storage, path)
    from anyrank.sources.tools.read import list_weights  # a door: see test_house

    return list_weights(name, storage, path)


# A format's name, in FORMATS of the core or FOLDERS -> what lists it. Each imports its reader when
# it is called: a folder of safetensors needs no pickles.
LISTERS: dict[str, Callable[[Storage, str], Listing]] = {
    "torch": _torch_file,
    "anyrank": _run_folder,
    "dcp": _dcp_folder,
    "weights": _folder_of_weights,
    "folder": _folder,  # of any of them, or of another tool's
}


def list_as(name: str, storage: Storage, path: str) -> Listing:
    """What a file or a folder of one of these formats holds.

    Raises:
        LoadError, UnsafeFile: as the reader.
    """
    return LISTERS[name](storage, path)
