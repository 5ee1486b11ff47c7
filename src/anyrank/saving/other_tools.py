"""What another tool saved in a run's folder, found by names alone: no file is opened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from anyrank.files.block_sums import SUFFIX
from anyrank.files.manifest import MANIFEST
from anyrank.files.storage import Storage, join_path
from anyrank.formats.foreign_formats import FILES, recognises
from anyrank.formats.run_folder import INDEX
from anyrank.formats.sources import checkpoint_among

LEVELS = 3  # lightning_logs/version_0/checkpoints
MAX_FOLDERS = 200  # that are listed, each by one request in an object store
# The names under which tools keep checkpoints. Other folders are the user's own, samples/ say, and
# not looked into; below one of these they are listed last.
LIKELY = re.compile(
    r"^((lightning_logs|checkpoints?|ckpts?|best|last|latest)$"
    r"|(version|global_?step|step|checkpoint|ckpt|epoch|iter|pytorch_model|optimizer).*\d)"
)


class Found(NamedTuple):
    """Another tool's checkpoint: the path that reads it, and what shows that it is one."""

    place: str
    sign: str


def checkpoint_of_another(names: list[str]) -> str | None:
    """What shows that a folder with these entries is a checkpoint, if no save of a run began it."""
    begun = any(name in (MANIFEST, INDEX) or name.endswith(SUFFIX) for name in names)
    return None if begun else checkpoint_among(names)


def find_checkpoint(storage: Storage, path: str, skip: re.Pattern[str]) -> Found | None:
    """The uppermost checkpoint of another tool in a folder; of several the one with the highest
    number in its name.

    Args:
        storage: where it is.
        path: the folder.
        skip: names in it that are the run's own.

    Raises:
        OSError: the storage does not say what is in the folder.
    """
    level: list[tuple[str, ...]] = [()]
    listed: dict[tuple[str, ...], list[str]] = {}
    for _ in range(LEVELS + 1):
        below: list[tuple[str, ...]] = []
        for parts in level[: MAX_FOLDERS - len(listed)]:
            entries = _entries(storage, _under(path, parts))
            names = listed[parts] = list(entries)
            if sign := checkpoint_of_another(names):
                return Found(_place(path, parts, sign, listed), sign)
            if not checkpoint_among(names):  # else a step of another run of anyrank's
                inner = [name for name in _folders(entries) if not skip.match(name)]
                below += [(*parts, name) for name in inner if parts or _is_likely(name)]
        level = below
    return None


def _entries(storage: Storage, folder: str) -> Mapping[str, bool]:
    """Nothing for a folder that is closed to this user, as `lost+found` is, or gone since."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return storage.entries(folder)
    return {}


def _folders(entries: Mapping[str, bool]) -> list[str]:
    names = [name for name, is_folder in entries.items() if is_folder and name[0] != "."]
    return sorted(names, key=_rank, reverse=True)


def _rank(name: str) -> tuple[bool, list[int]]:
    return _is_likely(name), [*map(int, re.findall(r"\d+", name))]


def _is_likely(name: str) -> bool:
    return LIKELY.match(name.lower()) is not None


def _place(
    path: str, parts: tuple[str, ...], sign: str, listed: Mapping[tuple[str, ...], list[str]]
) -> str:
    """What `resume` takes: the uppermost folder that a reader knows, else the file itself."""
    above = [parts[:n] for n in range(len(parts) + 1)]
    known = next((each for each in above if recognises(listed[each])), None)
    if known is None and sign in listed[parts] and sign.lower().endswith(FILES):
        return _under(path, (*parts, sign))
    return _under(path, parts if known is None else known)


def _under(path: str, parts: tuple[str, ...]) -> str:
    for name in parts:
        path = join_path(path, name)
    return path
