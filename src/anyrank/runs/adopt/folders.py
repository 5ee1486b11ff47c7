"""Look for other content in a folder for a new run, only by names: no file is opened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from anyrank.files.manifest import MANIFEST
from anyrank.files.storage import Storage, join_path
from anyrank.sources.endings import ENDINGS, format_of
from anyrank.sources.readers.folders import checkpoint_among, is_foreign_checkpoint
from anyrank.sources.run_step import INDEX, list_steps

MAX_FOLDERS = 200  # maximum number of folders to list; in an object store each costs a request
MEGATRON = "latest_checkpointed_iteration.txt"
OF_DATA = (".bin", ".pt")  # endings that files of a user's own data may have too


def _has_run_files(names: Sequence[str]) -> bool:
    """Return True if a save of a run wrote these files; DCP folders of `convert` have neither."""
    return MANIFEST in names or INDEX in names


def find_other_content(storage: Storage, path: str, own_names: re.Pattern[str]) -> str | None:
    """Explain why a folder cannot hold a new run, with the way out; return None if it can.

    Looks into the folder and its direct subfolders only.

    Args:
        storage: storage of the folder.
        path: path of the folder.
        own_names: pattern of subfolders that an earlier save of the run itself may have created.

    Raises:
        OSError: the storage cannot list the folder.
    """
    if storage.is_file(path):
        return _tool_message(path, "a file")
    entries = _list_entries(storage, path)
    names = [*entries]
    if MANIFEST in names:
        return "is a step of a run. Pass the run's folder."
    sign = None if _has_run_files(names) else checkpoint_among(names)
    if sign is not None and not is_foreign_checkpoint(names) and format_of(sign) == "torch":
        return _tool_message(join_path(path, sign), sign)
    if sign is not None or is_foreign_checkpoint(names) or MEGATRON in names:
        return _tool_message(path, sign or "recognized by the names in it")
    folders = [name for name, is_dir in entries.items() if is_dir and name[0] != "."]
    folders = [name for name in folders if not own_names.match(name)]
    for name in sorted(folders, key=_numbers_in, reverse=True)[:MAX_FOLDERS]:
        problem = _find_in_subfolder(storage, join_path(path, name))
        if problem is not None:
            return problem
    return None


def _find_in_subfolder(storage: Storage, folder: str) -> str | None:
    """Do the work of `find_other_content` for a subfolder."""
    names = [*_list_entries(storage, folder)]
    if list_steps(storage, folder, names):
        return (
            f"contains run folders but is not one itself. Pass one of them, such as "
            f"Checkpoints({folder!r}), to resume it, or a new folder for a new run."
        )
    if _has_run_files(names):
        return None  # a step without its manifest, or a renamed one
    weights = sorted(name for name in names if _is_weights(name))
    if weights and checkpoint_among(names) and not is_foreign_checkpoint(names):
        is_torch = format_of(weights[0]) == "torch"
        return _tool_message(join_path(folder, weights[0]) if is_torch else folder, weights[0])
    return (
        _tool_message(folder, "recognized by the names in it")
        if is_foreign_checkpoint(names)
        else None
    )


def _is_weights(name: str) -> bool:
    """Return whether a file in a subfolder holds weights, by its name."""
    name = name.lower()
    if name.endswith(OF_DATA):
        return name.startswith(("model", "pytorch_model"))
    return name.endswith((*ENDINGS, ".distcp"))


def _tool_message(path: str, sign: str) -> str:
    return (
        f"contains another tool's checkpoint ({path}, {sign}), not an anyrank run. Use a separate "
        f"folder for Checkpoints, and start the run with resume({path!r}); for only the weights, "
        f"call anyrank.load(model, {path!r})."
    )


def _list_entries(storage: Storage, folder: str) -> Mapping[str, bool]:
    """List the entries; none if the folder does not exist or is not readable (lost+found)."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return storage.entries(folder)
    return {}


def _numbers_in(name: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", name))]
