"""Which step a resume goes on from: the newest that verifies; damaged ones are set aside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.files.run_folder import list_step
from anyrank.loading.verify import check_files
from anyrank.resume.folder import RunFolder
from anyrank.world.ranks import Ranks

VERIFY = ("size", "full", "off")


@dataclass(frozen=True)
class Found:
    """A step that verified, and the damaged ones that were passed over."""

    name: str
    manifest: Manifest
    listing: Listing
    newest_step: int
    newest_samples: int
    set_aside: list[str]


def find(
    folder: RunFolder,
    which: str | int,
    verify: str,
    ranks: Ranks,
    fit: Callable[[Found], str | None],
) -> Found | None:
    """The newest step that verifies, or the one asked for; None for an empty folder. All ranks.

    `fit` is called by all ranks with a step that verified, and may still find damage, which it
    returns in words. Damaged steps are renamed `.bad-...` and passed over.

    Raises:
        CheckpointError: steps are there and none can be used, or the one asked for is not there.
    """
    first = ranks.ranks[0]
    set_aside: list[str] = []
    newest, samples, reasons = 0, 0, list[str]()
    while True:
        looked = ranks.from_one("looking for a checkpoint", first, lambda: _look(folder, which))
        if looked is None:
            break
        step, name, manifest, listing, problem = looked
        newest = max(newest, step)
        if manifest is not None:
            samples = max(samples, manifest.samples)
        if listing is not None and verify == "full":
            problem = _verify(listing, ranks)
        if problem is None:
            assert manifest is not None
            assert listing is not None
            found = Found(name, manifest, listing, newest, samples, set_aside)
            problem = fit(found)
            if problem is None:
                return found
        reasons.append(problem)
        if which not in ("auto", "must"):
            raise CorruptCheckpoint(f"step {which} was asked for and is damaged: {problem}")
        set_aside.append(_set_aside(folder, name, ranks))
    if reasons:
        raise CorruptCheckpoint(
            f"{folder.path}: all {len(reasons)} checkpoints are damaged, and were set aside as "
            f"{', '.join(set_aside)}; the newest: {reasons[0]}"
        )
    bad = ranks.from_one("looking for a checkpoint", first, lambda: _bad(folder))
    if bad:
        raise CheckpointError(
            f"{folder.path}: has no checkpoint but damaged ones set aside ({', '.join(bad)}): "
            "repair one and rename it, or start in an empty folder"
        )
    return None


def _bad(folder: RunFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(".bad-")]


def _set_aside(folder: RunFolder, name: str, ranks: Ranks) -> str:
    first = ranks.ranks[0]
    return ranks.from_one("setting aside", first, lambda: folder.set_aside(name, "bad-damaged"))


Looked = tuple[int, str, Manifest | None, Listing | None, str | None]


def _look(folder: RunFolder, which: str | int) -> Looked | None:
    """The step to try, with what is wrong with it. One rank."""
    steps = folder.committed()
    if which not in ("auto", "must"):
        chosen = [(step, name) for step, name in steps if step == which]
        if not chosen:
            there = ", ".join(str(step) for step, _ in steps[:10]) or "none"
            raise CheckpointError(f"{folder.path}: has no step {which}; it has {there}")
        steps = chosen
    if not steps:
        return None
    step, name = steps[0]
    try:
        manifest = folder.examine(name)
        return step, name, manifest, list_step(folder.store, folder.join(name), manifest), None
    except CorruptCheckpoint as error:
        manifest = None  # it may be sound itself, and tell how much is lost
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder.store, folder.join(name))
        return step, name, manifest, None, str(error)


def _verify(listing: Listing, ranks: Ranks) -> str | None:
    """Compare every byte with its checksum, each rank a part; what is wrong, or None. All ranks."""

    def check() -> str | None:
        try:
            check_files(listing, ranks.index, ranks.size, ranks.check)
        except LoadError as error:
            return str(error)
        return None

    said = ranks.together("verifying the checkpoint", check)
    return next((problem for problem in said if problem is not None), None)


def verified_in_words(verify: str) -> str:
    return {
        "full": "every byte of every file, by checksum",
        "size": "sizes of all files, checksums of the small ones",
        "off": "checksums of the manifest and the index only",
    }[verify]


def narrow(which: str | int) -> str | int:
    """`resume`'s second argument, checked.

    Raises:
        ValueError: it is none of "auto", "must" and a step.
    """
    if which in ("auto", "must") or (isinstance(which, int) and which >= 0):
        return which
    raise ValueError(f"resume takes 'auto', 'must' or a step, not {which!r}")
