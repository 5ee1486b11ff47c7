"""Runs as sources: the steps in a folder, and the weights of one step or the newest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import MANIFEST, read_manifest
from anyrank.files.storage import Storage, join_path, storage_for
from anyrank.sources.run_step import ASIDE, SavedStep, StepFolder, describe, list_steps, read_index
from anyrank.sources.step_listing import locator_of
from anyrank.wording import join_first

WEIGHTS_PREFIX = "model."  # prefix of the names of weights in a step


def steps_in(folder: str) -> list[SavedStep]:
    """Return the steps with a readable manifest, the newest first; [] if there is no run."""
    storage = storage_for(folder)
    if not storage.is_dir(folder):
        return []
    steps: list[SavedStep] = []
    for step in whole_steps(storage, folder, storage.names(folder)):
        path = join_path(folder, step.name)
        with contextlib.suppress(AnyrankError):
            steps.append(describe(read_manifest(storage, path), path))
    return steps


def whole_steps(storage: Storage, folder: str, names: Iterable[str]) -> list[StepFolder]:
    """Return the steps of `list_steps` that have a manifest."""
    return [step for step in list_steps(storage, folder, names) if step.is_whole]


def no_step(names: Iterable[str]) -> str:
    """Return the error text for a run's folder that has no committed step."""
    aside = sorted(name for name in names if name.startswith(ASIDE))
    text = "has no committed step of a run"
    if not aside:
        return text
    verb = "was" if len(aside) == 1 else "were"
    return (
        f"{text}; {join_first(aside, 3)} {verb} set aside. anyrank.verify() shows what is wrong "
        "with such a step; if it is intact, rename it back to step-N to use it."
    )


def list_folder(storage: Storage, folder: str) -> Listing:
    """List the weights of a step, or of a run's newest step, without the positions of their bytes.

    Raises:
        LoadError: the run has no committed step, or the step is corrupt.
    """
    names = storage.names(folder)
    if MANIFEST not in names:
        for step in whole_steps(storage, folder, names):
            return list_folder(storage, join_path(folder, step.name))
        raise LoadError(f"{folder}: {no_step(names)}")
    try:
        manifest = read_manifest(storage, folder)
        data = read_index(storage, folder, manifest)
        locator = locator_of(storage, folder, manifest.ranks, data)
        listing = replace(locator, saved=manifest.identity).list_shapes()
    except AnyrankError as error:
        raise LoadError(str(error)) from error
    beside = {k: t for k, t in listing.tensors.items() if not k.startswith(WEIGHTS_PREFIX)}
    skipped = dict.fromkeys(beside, "in a different part")
    weights = {
        k[len(WEIGHTS_PREFIX) :]: t
        for k, t in listing.tensors.items()
        if k.startswith(WEIGHTS_PREFIX)
    }
    table = WEIGHTS_PREFIX.removesuffix(".")
    return replace(listing, tensors=weights, skipped=skipped, table=table, beside=beside)
