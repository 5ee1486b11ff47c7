"""Look for other content in a folder for a new run, by names alone: no file is opened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from anyrank.files.manifest import MANIFEST
from anyrank.files.storage import Storage, join_path
from anyrank.sources.endings import format_of
from anyrank.sources.readers.folders import checkpoint_among, is_of_tool
from anyrank.sources.run_step import INDEX, list_steps

MAX_FOLDERS = 200  # most folders to list; in an object store each costs a request
MEGATRON = "latest_checkpointed_iteration.txt"
# Weights in a subfolder. Files of a user's own data may also end in .bin and .pt.
WEIGHTS_NAME = re.compile(
    r".*\.(distcp|safetensors|index\.json|ckpt|pth)$|(pytorch_)?model.*\.(bin|pt)$", re.IGNORECASE
)


def _has_run_files(names: Sequence[str]) -> bool:
    """Return whether a save of a run wrote these files; DCP folders of `convert` have neither."""
    return MANIFEST in names or INDEX in names


def find_other_content(storage: Storage, path: str, own_names: re.Pattern[str]) -> str | None:
    """Say why a folder cannot hold a new run, with the way out; None if it can.

    Looks into the folder and its subfolders, no deeper.

    Args:
        storage: storage of the folder.
        path: path of the folder.
        own_names: pattern of subfolders that a save of the run itself may have begun.

    Raises:
        OSError: the storage cannot list the folder.
    """
    if storage.is_file(path):
        return _tool_message(path, "a file")
    entries = _list_entries(storage, path)
    names = [*entries]
    if MANIFEST in names:
        return "is one step of a run: give the run's folder"
    sign = None if _has_run_files(names) else checkpoint_among(names)
    if sign is not None and not is_of_tool(names) and format_of(sign) == "torch":
        return _tool_message(join_path(path, sign), sign)
    if sign is not None or is_of_tool(names) or MEGATRON in names:
        return _tool_message(path, sign or "by the names in it")
    folders = [name for name, is_dir in entries.items() if is_dir and name[0] != "."]
    folders = [name for name in folders if not own_names.match(name)]
    for name in sorted(folders, key=_numbers_in, reverse=True)[:MAX_FOLDERS]:
        problem = _find_in_subfolder(storage, join_path(path, name))
        if problem is not None:
            return problem
    return None


def _find_in_subfolder(storage: Storage, folder: str) -> str | None:
    """Do what `find_other_content` does, for a subfolder."""
    names = [*_list_entries(storage, folder)]
    if list_steps(storage, folder, names):
        return (
            f"holds runs, and is no run itself: give Checkpoints({folder!r}) to resume that one, "
            "or a folder that does not exist yet for a new run"
        )
    if _has_run_files(names):
        return None  # a step without its manifest, or a renamed one
    weights = sorted(name for name in names if WEIGHTS_NAME.match(name))
    if weights and checkpoint_among(names) and not is_of_tool(names):
        is_torch = format_of(weights[0]) == "torch"
        return _tool_message(join_path(folder, weights[0]) if is_torch else folder, weights[0])
    return _tool_message(folder, "by the names in it") if is_of_tool(names) else None


def _tool_message(path: str, sign: str) -> str:
    return (
        f"holds no step of a run, but a checkpoint of another tool, {path} ({sign}): give "
        f"Checkpoints a folder of its own, and begin the run with resume({path!r}), or for the "
        f"weights alone call anyrank.load(model, {path!r})"
    )


def _list_entries(storage: Storage, folder: str) -> Mapping[str, bool]:
    """List the entries; none if the folder is absent or this user may not read it (lost+found)."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return storage.entries(folder)
    return {}


def _numbers_in(name: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", name))]
