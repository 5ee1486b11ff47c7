"""Lists weight files, whose format is known by their ending or by their first bytes.

CONTRIBUTING.md says how to add a format.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_range
from anyrank.sources import safetensors
from anyrank.sources.endings import FILES, format_of
from anyrank.sources.readers import torch_file
from anyrank.sources.readers.first_bytes import describe_file

HEAD_BYTES = 9  # enough to recognize files with unknown endings


@dataclass(frozen=True)
class FileFormat:
    """A format of weight files, whose endings are in `FILES`.

    Attributes:
        list_file: reads a file's headers.
        is_head: returns whether a file that starts with these bytes has this format.
    """

    list_file: Callable[[Storage, str], Listing]
    is_head: Callable[[bytes], bool]


FORMATS = {
    "safetensors": FileFormat(safetensors.list_file, safetensors.is_head),
    "torch": FileFormat(torch_file.list_file, torch_file.is_head),
}


def list_file(storage: Storage, path: str) -> Listing:
    """List the tensors of one file.

    Raises:
        LoadError: the file has none of these formats.
        UnsafeFile: a header with impossible sizes, or a pickle that would run code.
    """
    with explain_unreadable(storage, path):
        name = format_of_file(storage, path)
        if name is None:
            raise LoadError(
                f"{path}: unknown format. anyrank reads {', '.join(FILES)} and folders of them."
            )
        return FORMATS[name].list_file(storage, path)


@contextmanager
def explain_unreadable(storage: Storage, path: str) -> Generator[None]:
    """Turn an error in the block into one that says what the file is, if its first bytes show it.

    Raises:
        LoadError, UnsafeFile: the class of the error in the block, with the kind of the file
            instead of its details.
    """
    try:
        yield
    except (LoadError, UnsafeFile) as error:
        what = describe_file(storage, path, lambda head: _format_of_head(head) is not None)
        if what is None:
            raise
        raise type(error)(f"{path}: {what}") from error


def format_of_file(storage: Storage, path: str) -> str | None:
    """Return the name of a file's format, from its ending or its first bytes; None if unknown."""
    if (name := format_of(path)) is not None:
        return name
    with closing(storage.open(path)) as file:
        return _format_of_head(read_range(file, 0, min(HEAD_BYTES, file.info.size)))


def _format_of_head(head: bytes) -> str | None:
    return next((name for name, known in FORMATS.items() if known.is_head(head)), None)
