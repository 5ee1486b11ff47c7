"""Find where the path given to `Checkpoints.resume` leads: this run, another, another tool's."""

from __future__ import annotations

import os
from typing import NamedTuple

from anyrank.errors import CheckpointError
from anyrank.files.storage import reading, storage_for
from anyrank.runs.resume.options import FOREIGN, RENAMING, ResumeArguments
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.run_step import ASIDE, is_step, number_of
from anyrank.wording import join_first
from anyrank.world.ranks import Ranks

SHOWN = 8  # maximum number of names in an error message


class PathTarget(NamedTuple):
    """The target of a path: a step of this run, one of another run, or neither.

    Attributes:
        own_step: "must" for this run's folder, or the number of one of its steps.
        step: another run's folder, and the number of a step.
        problem: error text if there is nothing to resume.
    """

    own_step: str | int | None = None
    step: tuple[str, int] | None = None
    problem: str | None = None


def agree_on_path(
    path: str, folder: RunFolder, arguments: ResumeArguments, ranks: Ranks
) -> PathTarget:
    """Find the target of a path. Collective.

    Raises:
        ValueError: it leads to no step, or `rename` was passed with a run's path.
    """
    target = ranks.run_on_one("looking at the path", lambda: _find_target(path, folder))
    if target.problem:
        raise ValueError(target.problem)
    foreign = [name for name in FOREIGN if getattr(arguments, name) is not None]
    if foreign and (target.own_step is not None or target.step is not None):
        way_out = RENAMING if foreign == ["rename"] else f"Remove {foreign[0]}=."
        raise ValueError(
            f"{foreign[0]}= applies only to another tool's checkpoint, but {path} belongs to an "
            f"anyrank run. {way_out}"
        )
    return target


def _find_target(path: str, folder: RunFolder) -> PathTarget:
    """Find the target of a path. On one rank."""
    path = path.rstrip("/")
    run = RunFolder(storage_for(path), path)
    with reading(path):
        if not run.store.is_file(path) and not run.store.is_dir(path):
            return PathTarget(problem=_no_step_text(path, folder, "no such path"))
        is_run_step = is_step(run.store, path)
    own_path, resolved = _resolve(folder.path), _resolve(path)
    if resolved == own_path:
        return PathTarget(own_step="must")
    if resolved.startswith(f"{own_path}/"):
        first_name = resolved.removeprefix(f"{own_path}/").partition("/")[0]
        number = number_of(first_name)
        if number is not None:
            return PathTarget(own_step=number)
        if first_name.startswith(ASIDE) or run.store.is_file(folder.join(first_name)):
            return PathTarget(problem=_no_step_text(path, folder, "not a step of the run"))
    parent, _, name = resolved.rpartition("/")
    number = number_of(name)
    if is_run_step and number is None:
        raise CheckpointError(f"{path}: is a renamed step of a run. Rename it back to step-N.")
    if is_run_step and number is not None:
        return PathTarget(step=(parent, number))
    steps = run.whole_steps()
    return PathTarget(step=(path, steps[0].number) if steps else None)


def _no_step_text(path: str, folder: RunFolder, problem: str) -> str:
    """Compose the error text for a path that leads to no step."""
    directory = "" if "://" in path else f" (working directory {os.getcwd()})"
    steps = ", ".join(str(step.number) for step in folder.whole_steps()[:10]) or "no steps"
    text = (
        f"resume({path!r}): {problem}{directory}. Pass 'auto', 'must', a step number "
        f"({folder.path} has {steps})"
    )
    store, parent = storage_for(path), path.rpartition("/")[0]
    own_path = _resolve(folder.path)  # its steps are listed above
    if parent not in ("", ".") and store.is_dir(parent) and _resolve(parent) != own_path:
        text += f", or a path ({parent} contains {join_first(sorted(store.names(parent)), SHOWN)})"
    return text


def _resolve(path: str) -> str:
    """Return the canonical path of a folder, however it is written."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
