"""anyrank's own run folders, for their weights: `step-N/` folders, each DCP plus `anyrank.json`."""

from __future__ import annotations

import re

from anyrank.errors import LoadError
from anyrank.files import dcp
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, join_path

MANIFEST = "anyrank.json"
STEP = re.compile(r"^step-(\d+)$")  # anchored: step-3.tmp-... and .bad-... are no checkpoints
WEIGHTS = "model."


def recognises(names: list[str]) -> bool:
    """Whether a folder with these entries is a run, or one step of a run."""
    return MANIFEST in names or any(STEP.match(name) for name in names)


def list_folder(storage: Storage, folder: str) -> Listing:
    """The weights of a step, or of the newest committed step of a run.

    Raises:
        LoadError: the run has no committed step.
    """
    names = storage.names(folder)
    if MANIFEST not in names:
        steps = sorted((int(m[1]), name) for name in names if (m := STEP.match(name)))
        for _, name in reversed(steps):
            step = join_path(folder, name)
            if MANIFEST in storage.names(step):
                return list_folder(storage, step)
        raise LoadError(f"{folder}: none of its {len(steps)} steps was committed ({MANIFEST})")
    listing = dcp.list_folder(storage, folder)
    weights = {k: t for k, t in listing.tensors.items() if k.startswith(WEIGHTS)}
    others = tuple(f"{k}: not weights" for k in listing.tensors if k not in weights)
    renamed = {k[len(WEIGHTS) :]: t for k, t in weights.items()}
    return Listing("anyrank run", listing.files, renamed, {}, others, listing.checksums)
