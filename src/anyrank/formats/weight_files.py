"""Files of weights: which format one is in, by its ending or else by its first bytes.

A new format is a module that lists a file, and a row of FORMATS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_range
from anyrank.formats import safetensors, torch_file
from anyrank.formats.first_bytes import saying_what_it_is

HEAD_BYTES = 9  # by which files of other endings are told


@dataclass(frozen=True)
class FileFormat:
    """A format of files of weights.

    Attributes:
        name: in reports, and as `to=` of `convert`.
        endings: of its files, in the order in which folders are searched for them.
        list_file: reads a file's headers.
        is_head: whether a file that begins with these bytes is in it.
    """

    name: str
    endings: tuple[str, ...]
    list_file: Callable[[Storage, str], Listing]
    is_head: Callable[[bytes], bool]


# In the order in which folders are searched for them: safetensors before pickles.
FORMATS = (
    FileFormat("safetensors", (".safetensors",), safetensors.list_file, safetensors.is_head),
    FileFormat("torch", (".bin", ".pth", ".pt", ".ckpt"), torch_file.list_file, torch_file.is_head),
)
FILES = {ending: file_format for file_format in FORMATS for ending in file_format.endings}
ENDINGS = (*FILES, *(f"{ending}.index.json" for ending in FILES))


def format_of(path: str) -> str | None:
    """The name of a file's format, by the ending of its name; None for another ending."""
    file_format = FILES.get(os.path.splitext(path)[1].lower())
    return None if file_format is None else file_format.name


def list_file(storage: Storage, path: str) -> Listing:
    """The tensors of one file of any of these formats.

    Raises:
        LoadError: it is in none of them.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    with saying_what_it_is(storage, path):
        file_format = FILES.get(os.path.splitext(path)[1].lower()) or _by_head(storage, path)
        return file_format.list_file(storage, path)


def _by_head(storage: Storage, path: str) -> FileFormat:
    with closing(storage.open(path)) as file:
        head = read_range(file, 0, min(HEAD_BYTES, file.info.size))
    for file_format in FORMATS:
        if file_format.is_head(head):
            return file_format
    raise LoadError(f"{path}: unknown format; anyrank reads {', '.join(FILES)} and folders of them")
