"""What else is in a folder that is to hold a new run, by names alone: no file is opened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from anyrank.files.manifest import MANIFEST
from anyrank.files.storage import Storage, join_path
from anyrank.formats.run_folder import INDEX, list_steps
from anyrank.formats.sources import checkpoint_among, is_of_tool
from anyrank.formats.weight_files import format_of

MAX_FOLDERS = 200  # that are listed, each by one request in an object store
MEGATRON = "latest_checkpointed_iteration.txt"
# Weights within a folder of the folder. Files of a user's own data end in .bin and .pt as well.
WEIGHTS = re.compile(
    r".*\.(distcp|safetensors|index\.json|ckpt|pth)$|(pytorch_)?model.*\.(bin|pt)$", re.IGNORECASE
)


def _checkpoint_of_another(names: Sequence[str]) -> str | None:
    """What shows that a folder with these entries is a checkpoint, if no save of a run began it."""
    return None if _is_of_a_run(names) else checkpoint_among(names)


def _is_of_a_run(names: Sequence[str]) -> bool:
    """Whether a save of a run wrote these files: DCP folders of `convert` have neither of two."""
    return MANIFEST in names or INDEX in names


def other_in(storage: Storage, path: str, own: re.Pattern[str]) -> str | None:
    """Why a folder is no place for a new run, with the way out; None for a good place.

    The folder and those in it are looked at, and none below.

    Args:
        storage: where it is.
        path: the folder.
        own: names in it that a run's own save may have begun.

    Raises:
        OSError: the storage does not say what is in the folder.
    """
    if storage.is_file(path):
        return _of_tool(path, "a file")
    entries = _entries(storage, path)
    names = [*entries]
    if MANIFEST in names:
        return "is one step of a run: give the run's folder"
    sign = _checkpoint_of_another(names)
    if sign is not None and not is_of_tool(names) and format_of(sign) == "torch":
        return _of_tool(join_path(path, sign), sign)
    if sign is not None or is_of_tool(names) or MEGATRON in names:
        return _of_tool(path, sign or "by the names in it")
    folders = [name for name, is_dir in entries.items() if is_dir and name[0] != "."]
    folders = [name for name in folders if not own.match(name)]
    for name in sorted(folders, key=_by_number, reverse=True)[:MAX_FOLDERS]:
        problem = _within(storage, join_path(path, name))
        if problem is not None:
            return problem
    return None


def _within(storage: Storage, folder: str) -> str | None:
    """As `other_in`, of a folder in the folder."""
    names = [*_entries(storage, folder)]
    if any(step.is_whole for step in list_steps(storage, folder, names)):
        return (
            f"holds runs, and is none: {folder} is one: give Checkpoints({folder!r}) to go on with "
            "it, or a folder that is not there yet for a new run"
        )
    if _is_of_a_run(names):
        return None  # a step that lost its manifest, or was renamed
    weights = sorted(name for name in names if WEIGHTS.match(name))
    if weights and checkpoint_among(names) and not is_of_tool(names):
        is_read = format_of(weights[0]) == "torch"
        return _of_tool(join_path(folder, weights[0]) if is_read else folder, weights[0])
    return _of_tool(folder, "by the names in it") if is_of_tool(names) else None


def _of_tool(place: str, sign: str) -> str:
    return (
        f"holds no step of a run, but what another tool saved: {place} ({sign}); give Checkpoints "
        f"a folder of its own, and go on from there with resume({place!r}), or for its weights "
        f"alone call anyrank.load(model, {place!r})"
    )


def _entries(storage: Storage, folder: str) -> Mapping[str, bool]:
    """Nothing for a folder that is closed to this user, as `lost+found` is, or not there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return storage.entries(folder)
    return {}


def _by_number(name: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", name))]
