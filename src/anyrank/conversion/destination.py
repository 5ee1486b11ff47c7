"""Where a conversion goes: checked first, written beside it, and renamed into place at the end."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError
from anyrank.files.storage import join_path, read_whole, storage_for
from anyrank.files.store import WritableStorage, store_for, storing
from anyrank.formats.sources import list_source
from anyrank.wording import joined

UNFINISHED = ".unfinished-"
# All that is in a folder of weights by its name. Anything else may be somebody's only copy.
OWN_NAMES = re.compile(
    r"(model|adapter_model|diffusion_pytorch_model)(-\d+-of-\d+)?\.safetensors"
    r"|(model|adapter_model|diffusion_pytorch_model)\.safetensors\.index\.json"
    r"|\.metadata|__\d+_\d+\.distcp"
    r"|(config|generation_config|adapter_config|preprocessor_config|processor_config)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(video_preprocessor_config|model_index|modules|sentence_bert_config)\.json"
    r"|vocab\.txt|merges\.txt|chat_template\.jinja|tokenizer\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|tokenizer\.tiktoken"
)
SHOWN = 5
MAX_BYTES = 64 << 20  # of a file that is compared with the source's


@dataclass(frozen=True)
class Destination:
    """A place that holds nothing, or what may be replaced.

    Attributes:
        path: a file or a folder, as the caller named it, without a slash at its end; of a
            link, what it points to.
        store: the storage that it is in.
        is_file: whether it is one file.
        folder: where files are written until all of them are there.
        held: names in the folder that is replaced, or of the file.
    """

    path: str
    store: WritableStorage
    is_file: bool
    folder: str
    held: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    def prepare(self, nbytes: int) -> None:
        """Make the folder that is written to.

        Raises:
            CheckpointError: it cannot be made, or has not so much space.
        """
        with storing(self.folder):
            self.store.make_folder(self.folder)
        if self.store.renames:
            with contextlib.suppress(OSError, AttributeError):
                disk = os.statvfs(self.folder)
                free = disk.f_bavail * disk.f_frsize
                if free < nbytes:
                    raise CheckpointError(
                        f"{self.path}: takes {nbytes} bytes, and {free} are free there: free "
                        "space, or give another place"
                    )

    def commit(self) -> None:
        """Give what was written its name.

        Raises:
            CheckpointError: something else came there in the meantime, or the storage refuses.
        """
        if not self.store.renames:
            return
        with storing(self.path):
            self.store.sync_folder(self.folder)
            faults.point("convert.commit")
            written = join_path(self.folder, self.name) if self.is_file else self.folder
            old = f"{self.path}.replaced-{uuid.uuid4().hex[:8]}"
            now = _entries(self.store, self.path)
            if now - self.held or os.path.islink(self.path):
                new = ", ".join(sorted(now - self.held)[:SHOWN])
                raise CheckpointError(
                    f"{self.path}: {new or 'a link'} came there during the conversion: give "
                    "another place"
                )
            is_replaced = bool(now)
            if self.is_file:
                os.replace(written, self.path)
                os.rmdir(self.folder)
            else:
                if is_replaced:
                    self.store.rename(self.path, old)
                self.store.rename(written, self.path)
            self.store.sync_folder(os.path.dirname(self.path) or ".")
            if is_replaced and not self.is_file:
                self.store.remove_folder(old)

    def abandon(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self.store.remove_folder(self.folder)


def destination(
    dst: str | os.PathLike[str], sources: Sequence[str], is_file: bool, overwrite: bool
) -> Destination:
    """Where to write.

    Raises:
        ValueError: the source itself, a place inside it or above it, or one that must not be
            replaced.
    """
    path = os.fspath(dst)
    path = path.rstrip("/") or path
    store = store_for(path)
    if not path or path == "/":
        raise ValueError(f"dst={path!r}: give the path of a new file or folder")
    for source in sources:
        if _is_inside(path, source) or _is_inside(source, path):
            raise ValueError(
                f"{path}: is the source {source}, inside it, or above it: give another place"
            )
    if store.is_file(path) or store.is_dir(path):
        if store.renames and os.path.islink(path):
            path = os.path.realpath(path)  # what is renamed must not be the link
        _check_replaceable(store, path, is_file, overwrite, sources)
    elif store.renames and os.path.lexists(path):
        raise ValueError(f"{path}: is there, and neither a file nor a folder: give another place")
    if store.renames:
        _check_parent(path)
    folder = f"{path}{UNFINISHED}{uuid.uuid4().hex[:8]}" if store.renames else path
    if is_file and not store.renames:
        folder = path.rsplit("/", 1)[0]
    return Destination(path, store, is_file, folder, _entries(store, path))


def _check_parent(path: str) -> None:
    """Raises ValueError: a file is where a folder above the destination has to be."""
    above = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise ValueError(
            f"{path}: {above} is not a folder, so nothing goes in it: give another place"
        )


def _is_inside(inner: str, outer: str) -> bool:
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    here, there = os.path.realpath(inner), os.path.realpath(outer)
    return f"{here}/".startswith(f"{there.rstrip('/')}/")


def _check_replaceable(
    store: WritableStorage, path: str, is_file: bool, overwrite: bool, sources: Sequence[str]
) -> None:
    is_folder = store.is_dir(path)
    if is_folder and not is_file and not store.names(path):
        return
    if not overwrite:
        raise ValueError(
            f"{path}: is there already: give another place, or overwrite=True (--overwrite)"
        )
    if is_folder == is_file:
        raise ValueError(
            f"{path}: is a {'folder' if is_folder else 'file'}, and would become a "
            f"{'file' if is_file else 'folder'}: give another place"
        )
    if is_folder:
        _check_folder(store, path, sources)


def _check_folder(store: WritableStorage, path: str, sources: Sequence[str]) -> None:
    """Raises ValueError: a folder with anything in it that replacing it would lose."""
    others = [name for name in sorted(store.names(path)) if not _is_own(store, path, name, sources)]
    if others:
        raise ValueError(
            f"{path}: is not a folder of weights and nothing else: overwriting would delete "
            f"{joined(others, SHOWN)}: move that, or give another place"
        )
    try:
        list_source(path)
    except AnyrankError as error:
        raise ValueError(
            f"{path}: is not a folder of weights, so it is not replaced: give another place "
            f"({error})"
        ) from error


def _is_own(store: WritableStorage, path: str, name: str, sources: Sequence[str]) -> bool:
    """Whether an entry is a file of weights, or a copy of one in a source's folder."""
    file = join_path(path, name)
    if store.is_dir(file):
        return False
    if OWN_NAMES.fullmatch(name):
        return True
    places = [join_path(source, name) for source in sources if storage_for(source).is_dir(source)]
    return any(_is_copy(file, place) for place in places)


def _is_copy(one: str, other: str) -> bool:
    storages = [storage_for(path) for path in (one, other)]
    contents: list[bytes] = []
    for storage, path in zip(storages, (one, other), strict=True):
        if not storage.is_file(path) or storage.info(path).size > MAX_BYTES:
            return False
        contents.append(read_whole(storage, path))
    return contents[0] == contents[1]


def _entries(store: WritableStorage, path: str) -> frozenset[str]:
    """Names in a folder, or of a file; none where nothing is, or an empty folder."""
    if store.is_dir(path):
        return frozenset(store.names(path))
    is_there = store.is_file(path) or (store.renames and os.path.lexists(path))
    return frozenset([path.rsplit("/", 1)[-1]] if is_there else [])
