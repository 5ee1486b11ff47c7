"""Which step a resume goes on from: the newest that verifies, past what is damaged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.files.run_folder import list_step
from anyrank.resume.records import check_records
from anyrank.resume.run_store import RunFolder
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

VERIFY = ("size", "full", "off")


class Unreadable(CheckpointError):
    """A disk or the network does not hand out a step's bytes: no proof of damage."""


@dataclass(frozen=True)
class Found:
    """A step that verified, and the newer ones that were passed over.

    Attributes:
        set_aside: what damaged ones are called now.
        left: names of those that kept their place, as they could not be read or not be renamed.
        notes: why, in sentences.
        verify: whether what is read is compared with its checksums.
    """

    name: str
    manifest: Manifest
    listing: Listing
    newest_step: int
    newest_samples: int
    set_aside: list[str]
    left: list[str]
    notes: list[str]
    verify: bool


@dataclass(frozen=True)
class Look:
    """What one step is like. `damaged` is None for a good one, `unread` for one that may be."""

    step: int
    name: str
    manifest: Manifest | None = None
    listing: Listing | None = None
    damaged: str | None = None
    unread: str | None = None


class RejectedSteps:
    """The steps that were tried and cannot be used. Equal on all ranks, which all call it."""

    def __init__(self, folder: RunFolder, ranks: Ranks, verify: str) -> None:
        self.folder, self.ranks = folder, ranks
        self.verify = verify
        self.newest = self.samples = self.unread = 0
        self.reasons: list[str] = []
        self.set_aside: list[str] = []
        self.left: list[str] = []
        self.notes: list[str] = []

    def found(self, look: Look) -> Found:
        """The good one behind these."""
        assert look.manifest is not None
        assert look.listing is not None
        newest, samples = max(self.newest, look.step), max(self.samples, look.manifest.samples)
        rest = (self.set_aside, self.left, self.notes, self.verify == "full")
        return Found(look.name, look.manifest, look.listing, newest, samples, *rest)

    def add(self, look: Look) -> None:
        """Rename a step that is proved to be damaged; leave another as it is. All ranks."""
        self.newest = max(self.newest, look.step)
        if look.manifest is not None:
            self.samples = max(self.samples, look.manifest.samples)
        if look.damaged is None:
            self.unread += 1
            self._leave(look, str(look.unread), f"cannot be read: {look.unread}")
            return
        aside, refusal = _set_aside(self.folder, look.name, self.ranks)
        if aside is None:
            self._leave(look, look.damaged, f"is damaged and cannot be renamed: {refusal}")
            return
        self.reasons.append(look.damaged)
        self.set_aside.append(aside)

    def _leave(self, look: Look, reason: str, why: str) -> None:
        self.reasons.append(reason)
        self.left.append(look.name)
        self.notes.append(f"passed over and left as it is: {look.name} {why}")
        if self.ranks.index == 0:
            log.warning("%s: LOST: %s", self.folder.path, self.notes[-1])

    def error(self) -> CheckpointError:
        """What to raise when there is no other step."""
        path, count = self.folder.path, len(self.reasons)
        if self.unread:
            return CheckpointError(
                f"{path}: none of {count} checkpoints can be used, and {self.unread} may be sound "
                f"but cannot be read; the newest: {self.reasons[0]}"
            )
        aside = f", and were set aside as {', '.join(self.set_aside)}" if self.set_aside else ""
        return CorruptCheckpoint(
            f"{path}: all {count} checkpoints are damaged{aside}; the newest: {self.reasons[0]}"
        )


def find(
    folder: RunFolder,
    which: str | int,
    verify: str,
    ranks: Ranks,
    fit: Callable[[Found], str | None],
) -> Found | None:
    """The newest step that verifies, or the one asked for; None for an empty folder. All ranks.

    `fit` is called by all ranks with a step that verified, and may still find damage, which it
    returns in words. Damaged steps are renamed `.bad-...` and passed over. A step on a disk that
    does not hand it out is passed over as well, and keeps its name: it may be sound.

    Raises:
        CheckpointError: steps are there and none can be used, or the one asked for is not there.
    """
    first, passed = ranks.ranks[0], RejectedSteps(folder, ranks, verify)

    def look_for() -> Look | None:
        return _look(folder, which, passed.left, verify != "off")

    while (look := ranks.from_one("looking for a checkpoint", first, look_for)) is not None:
        if look.damaged is None and look.unread is None:
            found = passed.found(look)
            try:
                look = replace(look, damaged=fit(found))
            except Unreadable as error:
                if not folder.store.renames:  # the network: the next try may get through
                    raise CheckpointError(str(error), causes=error.causes) from error
                look = replace(look, unread=str(error))
            if look.damaged is None and look.unread is None:
                return found
        if which not in ("auto", "must"):
            if look.damaged is None:
                raise CheckpointError(f"step {which} was asked for: {look.unread}")
            raise CorruptCheckpoint(f"step {which} was asked for and is damaged: {look.damaged}")
        passed.add(look)
    if passed.reasons:
        raise passed.error()
    bad = ranks.from_one("looking for a checkpoint", first, lambda: _bad(folder))
    if bad:
        raise CheckpointError(
            f"{folder.path}: has no checkpoint but damaged ones set aside ({', '.join(bad)}): "
            "repair one and rename it, or start in an empty folder"
        )
    return None


def _bad(folder: RunFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(".bad-")]


def _set_aside(folder: RunFolder, name: str, ranks: Ranks) -> tuple[str | None, str]:
    """The new name, or None and why there is none. All ranks."""

    def rename() -> tuple[str | None, str]:
        try:
            return folder.set_aside(name, "bad-damaged"), ""
        except CheckpointError as error:
            return None, str(error)

    return ranks.from_one("setting aside", ranks.ranks[0], rename)


def _look(folder: RunFolder, which: str | int, left: list[str], sizes: bool) -> Look | None:
    """The step to try, with what is wrong with it. One rank."""
    steps = [one for one in folder.claimed() if one[1] not in left]
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
        manifest, small = folder.examine(name, sizes)
        check_records(manifest, folder.join(name))
        listing = list_step(folder.store, folder.join(name), manifest, small, sizes)
        return Look(step, name, manifest, listing)
    except CorruptCheckpoint as error:
        manifest = None  # it may be sound itself, and tell how much is lost
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder.store, folder.join(name))
        return Look(step, name, manifest, damaged=str(error))
    except CheckpointError as error:
        if which == step or not folder.may_be_sound(error):
            raise
        return Look(step, name, unread=str(error))


def verified_in_words(verify: str) -> str:
    """What a resume has compared, for its report."""
    return {
        "full": "every byte that was read, by checksum",
        "size": "sizes of all files, checksums of the small ones",
        "off": "checksums of the small files only",
    }[verify]


def narrow(which: str | int) -> str | int:
    """`resume`'s second argument, checked.

    Raises:
        ValueError: it is none of "auto", "must" and a step.
    """
    if which in ("auto", "must") or (isinstance(which, int) and which >= 0):
        return which
    raise ValueError(f"resume takes 'auto', 'must' or a step, not {which!r}")
