"""Files of weights: which format one is in, by its ending or else by its first bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_range
from anyrank.formats import safetensors, torch_file

LISTERS: dict[str, Callable[[Storage, str], Listing]] = {
    "safetensors": safetensors.list_file,
    "torch": torch_file.list_file,
}
# In the order in which folders are searched for them: safetensors before pickles.
FILES = {
    ".safetensors": "safetensors",
    ".bin": "torch",
    ".pth": "torch",
    ".pt": "torch",
    ".ckpt": "torch",
}
ENDINGS = (*FILES, *(f"{ending}.index.json" for ending in FILES))


def format_of(path: str) -> str | None:
    """The format of a file by the ending of its name; None for another ending."""
    return FILES.get(os.path.splitext(path)[1].lower())


def list_file(storage: Storage, path: str) -> Listing:
    """The tensors of one file of any of these formats.

    Raises:
        LoadError: it is in none of them.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    return LISTERS[format_of(path) or _by_head(storage, path)](storage, path)


def _by_head(storage: Storage, path: str) -> str:
    with closing(storage.open(path)) as file:
        head = read_range(file, 0, min(9, file.info.size))
    if head[:4] == torch_file.ZIP_MAGIC or head[:1] == b"\x80":
        return "torch"
    if head[8:9] == b"{":
        return "safetensors"
    raise LoadError(f"{path}: unknown format; anyrank reads {', '.join(FILES)} and folders of them")
