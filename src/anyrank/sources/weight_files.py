"""Files of weights: which format one is in, by its ending or else by its first bytes.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_range
from anyrank.sources import safetensors

# Of Meta's own releases: each is what one tensor-parallel rank holds.
META_PART = re.compile(r"consolidated\.\d+\.pth$")
OF_META = (
    "one rank's part of a tensor parallel model, as Meta releases them, and the parts do not say "
    "how they were cut: give the Hugging Face folder of the model, or convert it by transformers' "
    "convert_llama_weights_to_hf.py"
)
ZIP_MAGIC = b"PK\x03\x04"
HEAD_BYTES = 9  # by which files of other endings are told


@dataclass(frozen=True)
class FileFormat:
    """A format of files of weights.

    Attributes:
        name: in reports.
        endings: of its files, in the order in which folders are searched for them.
        list_file: reads a file's headers.
        is_head: whether a file that begins with these bytes is in it.
    """

    name: str
    endings: tuple[str, ...]
    list_file: Callable[[Storage, str], Listing]
    is_head: Callable[[bytes], bool]


def _list_torch_file(storage: Storage, path: str) -> Listing:
    # Pickles are long to read safely, and most files are none: a door, see test_house.
    from anyrank.sources.readers.listers import list_as

    return list_as("torch", storage, path)


def _is_torch_head(head: bytes) -> bool:
    """Whether a file of these first bytes is a zip, or a pickle as of torch before 1.6."""
    return head[:4] == ZIP_MAGIC or head[:1] == b"\x80"


# In the order in which folders are searched for them: safetensors before pickles.
FORMATS = (
    FileFormat("safetensors", (".safetensors",), safetensors.list_file, safetensors.is_head),
    FileFormat("torch", (".bin", ".pth", ".pt", ".ckpt"), _list_torch_file, _is_torch_head),
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


@contextmanager
def saying_what_it_is(storage: Storage, path: str) -> Generator[None]:
    """Say what a file is that could not be read, where its first bytes tell.

    Raises:
        LoadError, UnsafeFile: as within, with what the file is in place of what a reader missed.
    """
    try:
        yield
    except (LoadError, UnsafeFile) as error:
        from anyrank.sources.readers.first_bytes import what_it_is  # a door

        what = what_it_is(storage, path)
        if what is None:
            raise
        raise type(error)(f"{path}: {what}") from error


def _by_head(storage: Storage, path: str) -> FileFormat:
    with closing(storage.open(path)) as file:
        head = read_range(file, 0, min(HEAD_BYTES, file.info.size))
    for file_format in FORMATS:
        if file_format.is_head(head):
            return file_format
    raise LoadError(f"{path}: unknown format; anyrank reads {', '.join(FILES)} and folders of them")
