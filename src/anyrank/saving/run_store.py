"""A run's folder: names, the commit's last steps, what is kept, and what is cleaned up.

A step is written under `step-N.tmp-<run>-<tag>` and renamed when it is whole. Object stores rename
nothing: there a step is written in place, and its manifest, written last, is the commit.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence

from anyrank.errors import AnyrankError, CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.manifest import MANIFEST, STEP, Manifest, read_manifest, step_name
from anyrank.files.storage import absolute, join_path
from anyrank.files.store import WritableStorage, reading, storing, write_file
from anyrank.formats.run_folder import (
    SavedStep,
    check_sizes,
    committed,
    describe,
    is_step,
    steps_of,
)
from anyrank.saving.other_tools import checkpoint_of_another, other_in

log = logging.getLogger("anyrank.saving")

LATEST = "latest"
TEMPORARY = re.compile(r"^step-(\d+)\.tmp-([0-9a-f]+)-([0-9a-f]+)$")
REMOVED = ".removed-"
MIN_KEPT = 2


class RunFolder:
    """The files of one run. Used by one rank, the first."""

    def __init__(self, store: WritableStorage, path: str) -> None:
        self.store = store
        self.path = path
        self._place = absolute(path)

    def check_place(self) -> None:
        """Refuse a relative path that means another folder by now.

        Raises:
            CheckpointError: the process has changed its folder.
        """
        if absolute(self.path) != self._place:
            raise CheckpointError(
                f"the run is in {self._place}, and this process has gone to {os.getcwd()}: give "
                "Checkpoints an absolute path where the current folder changes"
            )

    def join(self, name: str) -> str:
        """The path of a thing in the folder."""
        return join_path(self.path, name)

    def names(self) -> list[str]:
        """What is in the folder; nothing when it is not there.

        Raises:
            CheckpointError: the storage does not say.
        """
        with reading(self.path):
            try:
                return self.store.names(self.path)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def committed(self) -> list[tuple[int, str]]:
        """Step and name of what claims to be committed, the newest first.

        Raises:
            CheckpointError: the storage does not say.
        """
        with reading(self.path):
            return committed(self.store, self.path, self.names())

    def claimed(self) -> list[tuple[int, str]]:
        """As `committed`, and steps that lost their manifest since, which is damage.

        Where nothing is renamed, a step without a manifest is one whose save died.

        Raises:
            CheckpointError: the storage does not say.
        """
        if not self.store.renames:
            return self.committed()
        return [(n, name) for n, name in steps_of(self.names()) if self._was_renamed(n, name)]

    def _was_renamed(self, step: int, name: str) -> bool:
        """Whether a folder got its name in a commit, after its manifest was written."""
        if name != step_name(step):
            return is_step(self.store, self.join(name))
        if self.store.is_file(self.join(name)):
            return False
        return is_step(self.store, self.join(name)) or self._of_another_tool(name) is None

    def check_no_other(self) -> None:
        """Refuse a folder without steps that holds something other than the start of a run.

        Raises:
            CheckpointError: it is a file, one step of a run, a folder of runs, or another tool's
                checkpoint.
        """
        if self.claimed():
            return
        with reading(self.path):
            # In an object store a save that died leaves its files under the step's own name.
            problem = other_in(self.store, self.path, TEMPORARY if self.store.renames else STEP)
        if problem is not None:
            raise CheckpointError(f"{self.path}: {problem}")

    def _of_another_tool(self, name: str) -> str | None:
        """The checkpoint in a folder within this one, if no save of a run began it."""
        if not self.store.is_dir(self.join(name)):
            return None
        if not self.store.renames and steps_of([name]):
            return None  # a save that died leaves its files under the step's name
        return checkpoint_of_another(self.store.names(self.join(name)))

    def may_be_sound(self, error: Exception) -> bool:
        """Whether a step was not read because a disk did not return its bytes: no proof of damage.

        An object store that does not answer is the network: the next try may get through.
        """
        causes = (error, error.__cause__)
        return self.store.renames and any(
            isinstance(cause, OSError | LoadError) for cause in causes
        )

    def begin(self, step: int, run: str, again: bool) -> str:
        """An empty folder for a step, after what dead saves of this run left is cleaned up.

        Raises:
            CheckpointError: the step is there, and is not to be saved `again`; or the folder cannot
                be made.
        """
        with storing(self.path):
            self.store.make_folder(self.path)
            self._clean(run)
            final = self.join(step_name(step))
            is_there = is_step(self.store, final)
            if is_there and not again:
                raise CheckpointError(
                    f"{final}: is committed already: a step is saved once; save after the next "
                    "step_done, or use another folder for another run"
                )
            if not self.store.renames:
                return final
            if self._of_another_tool(step_name(step)) is not None:
                raise CheckpointError(
                    f"{final}: is the checkpoint of another tool, and no step of this run: give "
                    "the run a folder of its own"
                )
            if self.store.is_dir(final) and not is_there:
                aside = self.set_aside(step_name(step), "bad-damaged")
                log.warning("%s: has lost its manifest, and is now %s", final, aside)
            path = f"{final}.tmp-{run[:8]}-{uuid.uuid4().hex[:8]}"
            self.store.make_folder(path)
            return path

    def check_run(self, run: str | None) -> None:
        """Refuse to mix two runs in one folder.

        Raises:
            CheckpointError: the newest readable step is of another run than this one, or there
                are steps, none can be read, and one may be sound.
        """
        unread: CheckpointError | None = None
        for step, name in self.claimed():
            try:
                other = read_manifest(self.store, self.join(name)).run
            except CorruptCheckpoint:
                continue
            except CheckpointError as error:
                if not self.may_be_sound(error):
                    raise
                unread = unread or error
                continue
            if other != run:
                raise CheckpointError(
                    f"{self.path}: holds step {step} of another run ({other[:8]}): resume that "
                    "one before saving, or give this run a folder of its own"
                )
            return
        if unread is not None:
            raise unread

    def _clean(self, run: str) -> None:
        """Remove what dead saves of this run and killed retention left.

        A run that has no step yet has no lasting id: all saves that died are its own. Where nothing
        is renamed, every step without a manifest is one: the lock leaves no other run that could
        be writing.
        """
        names = self.names()
        dead = [name for name in names if name.startswith(REMOVED)]
        is_first = not self.claimed()
        for name in names:
            match = TEMPORARY.match(name)
            if match and (is_first or match[2] == run[:8]):
                dead.append(name)
        for name in dead:
            with contextlib.suppress(OSError):
                self.store.remove_folder(self.join(name))
        if not self.store.renames:
            for _, name in steps_of(names):
                if not is_step(self.store, self.join(name)):
                    self.store.remove_folder(self.join(name))

    def commit(self, temporary: str, step: int, manifest: Manifest) -> str:
        """Make a written step exist; its name. After this it survives a power cut."""
        write_file(self.store, join_path(temporary, MANIFEST), manifest.to_bytes())
        name = step_name(step)
        if self.store.renames:
            with storing(self.path):
                self.store.sync_folder(temporary)
                if is_step(self.store, self.join(name)):
                    self._replace(name, temporary)
                else:
                    self.store.rename(temporary, self.join(name))
                    self.store.sync_folder(self.path)
        return name

    def _replace(self, name: str, temporary: str) -> None:
        """Save a step again: until the new one has its name, the old one is there."""
        old = temporary
        if not self.store.exchange(temporary, self.join(name)):
            old = self.join(self.set_aside(name, "replaced"))  # a kill here leaves both, unnamed
            self.store.rename(temporary, self.join(name))
        self.store.sync_folder(self.path)
        self.store.remove_folder(old)

    def tidy(self, name: str, keep: int, keeps: Callable[[int], bool]) -> list[str]:
        """After a commit: the `latest` hint, and what retention lets go. Failures are warnings.

        Never goes under two steps whose files all are there and have their sizes: their
        bytes are compared when they are read.
        """
        removed: list[str] = []
        try:
            self._point_at(name)
            steps = self.committed()
            count = max(keep, MIN_KEPT)
            old = [folder for step, folder in steps[count:] if not keeps(step)]
            if old and self._has_good([folder for _, folder in steps[:count]]):
                for folder in old:
                    self._remove(folder)
                    removed.append(folder)
        except (OSError, AnyrankError) as error:
            log.warning("%s: old steps were not removed: %s", self.path, error)
        return removed

    def _has_good(self, names: Sequence[str]) -> bool:
        """Whether enough of these steps are good; no more are read than it takes to know."""
        good = (name for name in names if self._is_good(name))
        return len([*itertools.islice(good, MIN_KEPT)]) == MIN_KEPT

    def _is_good(self, name: str) -> bool:
        try:
            manifest = read_manifest(self.store, self.join(name))
            check_sizes(self.store, self.join(name), manifest)
        except (OSError, AnyrankError):
            return False
        return True

    def _remove(self, name: str) -> None:
        """Un-commit first, so that a kill in between leaves no half step that looks whole."""
        if self.store.renames:
            hidden = self.join(f"{REMOVED}{name}-{uuid.uuid4().hex[:8]}")
            self.store.rename(self.join(name), hidden)
            self.store.remove_folder(hidden)
            return
        self.store.remove(join_path(self.join(name), MANIFEST))
        self.store.remove_folder(self.join(name))

    def _point_at(self, name: str) -> None:
        """The `latest` file is a hint for people and scripts; nothing here reads it."""
        if not self.store.renames:
            write_file(self.store, self.join(LATEST), f"{name}\n".encode())
            return
        fresh = self.join(f".{LATEST}-{uuid.uuid4().hex[:8]}")
        write_file(self.store, fresh, f"{name}\n".encode())
        self.store.rename(fresh, self.join(LATEST))

    def abandon(self, step: int) -> list[str]:
        """Set aside the steps after this one, from which the run now branches off."""
        newer = [name for number, name in self.claimed() if number > step]
        aside = [self.set_aside(name, "superseded") for name in newer]
        if aside:
            log.warning(
                "%s: the run goes on from step %d; newer ones are now %s",
                self.path,
                step,
                ", ".join(aside),
            )
        return aside

    def set_aside(self, name: str, why: str) -> str:
        """Take a step out of the way without deleting it; its new name."""
        taken = set(self.names())
        fresh = next(
            renamed
            for number in range(len(taken) + 2)
            if (renamed := f".{why}-{name}" + (f".{number}" if number else "")) not in taken
        )
        with storing(self.path):
            self.store.rename(self.join(name), self.join(fresh))
        return fresh

    def examine(self, name: str) -> tuple[Manifest, dict[str, bytes]]:
        """The manifest of a step, whose files all have the right sizes.

        With it the contents of the small files, by name.

        Raises:
            CorruptCheckpoint: a file is gone or is not what was written.
            CheckpointError: the storage does not say.
        """
        path = self.join(name)
        with reading(path):
            manifest = read_manifest(self.store, path)
            return manifest, check_sizes(self.store, path, manifest)

    def saved(self) -> list[SavedStep]:
        """The committed steps, the newest first; damaged ones are left out."""
        found: list[SavedStep] = []
        for _, name in self.committed():
            with contextlib.suppress(AnyrankError):
                found.append(describe(self.examine(name)[0], self.join(name)))
        return found
