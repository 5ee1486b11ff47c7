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

from anyrank.errors import AnyrankError, CheckpointError, CorruptCheckpoint
from anyrank.files.manifest import MANIFEST, STEP, Manifest, read_manifest, step_name
from anyrank.files.storage import Storage, absolute, join_path, reading, storing, write_file
from anyrank.formats.run_folder import (
    ASIDE,
    SavedStep,
    Step,
    check_sizes,
    describe,
    is_step,
    list_steps,
    number_of,
)
from anyrank.saving.other_tools import other_in

log = logging.getLogger("anyrank.saving")

LATEST = "latest"
TEMPORARY = re.compile(r"^step-(\d+)\.tmp-([0-9a-f]+)-([0-9a-f]+)$")
REMOVED = ".removed-"
DAMAGED = "damaged"
SUPERSEDED = "superseded"
MIN_KEPT = 2


class RunFolder:
    """The files of one run. Used by one rank, the first.

    Attributes:
        path: as it was given, for messages.
        place: where it is, wherever the process goes.
    """

    def __init__(self, store: Storage, path: str) -> None:
        self.store = store
        self.path = path
        self.place = absolute(path)

    def join(self, name: str) -> str:
        """The path of a thing in the folder."""
        return join_path(self.place, name)

    def shown(self, name: str) -> str:
        """The same path, as a user wrote the folder's while that means it still."""
        written = join_path(self.path, name)
        return written if absolute(written) == self.join(name) else self.join(name)

    def names(self) -> list[str]:
        """What is in the folder; nothing when it is not there.

        Raises:
            CheckpointError: the storage does not say.
        """
        with reading(self.path):
            try:
                return self.store.names(self.place)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def steps(self) -> list[Step]:
        """The run's steps, the newest first: whole ones, and damaged ones that lost their manifest.

        Where nothing is renamed, a step without a manifest is one whose save died, and is none.

        Raises:
            CheckpointError: the storage does not say.
        """
        with reading(self.path):
            found = list_steps(self.store, self.place, self.names())
        return [step for step in found if step.is_whole or self.store.renames]

    def whole(self) -> list[Step]:
        """Those of `steps` that have their manifest."""
        return [step for step in self.steps() if step.is_whole]

    def check_no_other(self) -> None:
        """Refuse a folder without steps that holds something other than the start of a run.

        Raises:
            CheckpointError: it is a file, one step of a run, a folder of runs, or another tool's
                checkpoint, or has the name of a step in a run; no folder can be made there.
        """
        if self.whole():
            return
        with reading(self.path):
            # In an object store a save that died leaves its files under the step's own name.
            own = TEMPORARY if self.store.renames else STEP
            problem = other_in(self.store, self.place, own) or self._in_another_run()
            problem = problem or self._unwritable()
        if problem is not None:
            raise CheckpointError(f"{self.path}: {problem}")

    def _in_another_run(self) -> str | None:
        """Why a step's name in the folder of a run is no place for a run of its own."""
        parent, _, name = self.place.rstrip("/").rpartition("/")
        number = number_of(name)
        if number is None or not self.store.is_dir(parent):
            return None
        steps = list_steps(self.store, parent, self.store.names(parent))
        if not any(step.is_whole for step in steps):
            return None
        return f"is a step of the run {parent}: give that, and resume({number}) to go back to it"

    def _unwritable(self) -> str | None:
        """Why no save could make its folder here, before hours of training; for local disks."""
        if not self.store.renames:
            return None
        path = self.place
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            return f"cannot be made, as {path} is a file: give another path"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"cannot be written, as {path} may not be: change its permissions"
        return None

    def begin(self, step: int, run: str, branch: int | None = None) -> str:
        """An empty folder for a step, after what dead saves of this run left is cleaned up.

        Args:
            step: to be written.
            run: its id.
            branch: the step that the run went back to: newer ones are set aside; or None.

        Raises:
            CheckpointError: the step is there already; or the folder cannot be made.
        """
        with storing(self.path):
            self.store.make_folder(self.place)
            self._clean(run)
            if branch is not None:
                self._set_newer_aside(branch)
            final = self.join(step_name(step))
            if is_step(self.store, final):
                raise CheckpointError(
                    f"{final}: is committed already: a step is saved once; save after the next "
                    "step_done, or use another folder for another run"
                )
            if not self.store.renames:
                return final
            if self.store.is_dir(final):
                aside = self.set_aside(step_name(step), DAMAGED)
                log.warning("%s: has lost its manifest, and is now %s", final, aside)
            path = f"{final}.tmp-{run[:8]}-{uuid.uuid4().hex[:8]}"
            self.store.make_folder(path)
            return path

    def check_run(self, run: str | None) -> None:
        """Refuse to mix two runs in one folder.

        Raises:
            CheckpointError: the newest undamaged step is of another run than this one, or it cannot
                be read.
        """
        for step, name, _ in self.steps():
            try:
                other = read_manifest(self.store, self.join(name)).run
            except CorruptCheckpoint:
                continue
            if other != run:
                raise CheckpointError(
                    f"{self.path}: holds step {step} of another run ({other[:8]}): resume that "
                    "one before saving, or give this run a folder of its own"
                )
            return

    def _clean(self, run: str) -> None:
        """Remove what dead saves of this run and killed retention left.

        A run that has no step yet has no lasting id: all saves that died are its own. Where nothing
        is renamed, every step without a manifest is one: the lock leaves no other run that could
        be writing.
        """
        names = self.names()
        dead = [name for name in names if name.startswith(REMOVED)]
        is_first = not self.steps()
        for name in names:
            match = TEMPORARY.match(name)
            if match and (is_first or match[2] == run[:8]):
                dead.append(name)
        for name in dead:
            with contextlib.suppress(OSError):
                self.store.remove_folder(self.join(name))
        if not self.store.renames:
            for step in list_steps(self.store, self.place, names):
                if not step.is_whole:
                    self.store.remove_folder(self.join(step.name))

    def commit(self, temporary: str, step: int, manifest: Manifest) -> str:
        """Make a written step exist; its name. After this it survives a power cut."""
        write_file(self.store, join_path(temporary, MANIFEST), manifest.to_bytes())
        name = step_name(step)
        if self.store.renames:
            with storing(self.path):
                self.store.sync_folder(temporary)
                self.store.rename(temporary, self.join(name))
                self.store.sync_folder(self.place)
        return name

    def tidy(self, name: str, keep: int, keeps: Callable[[int], bool]) -> list[str]:
        """After a commit: the `latest` hint, and what retention lets go. Failures are warnings.

        Never goes under two steps whose files all are there and have their sizes: their
        bytes are compared when they are read.
        """
        removed: list[str] = []
        try:
            self._point_at(name)
            steps = self.whole()
            count = max(keep, MIN_KEPT)
            old = [step.name for step in steps[count:] if not keeps(step.number)]
            if old and self._has_good([step.name for step in steps[:count]]):
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

    def _set_newer_aside(self, step: int) -> None:
        """Set aside the steps after this one, from which the run now branches off."""
        newer = [each for each in self.steps() if each.number > step]
        aside = [self.set_aside(n.name, SUPERSEDED if n.is_whole else DAMAGED) for n in newer]
        if aside:
            log.warning(
                "%s: the run goes on from step %d; newer ones are now %s",
                self.path,
                step,
                ", ".join(aside),
            )

    def set_aside(self, name: str, why: str) -> str:
        """Take a step out of the way without deleting it: `.aside-<why>-<name>`, its new name."""
        taken = set(self.names())
        fresh = next(
            renamed
            for number in range(len(taken) + 2)
            if (renamed := f"{ASIDE}{why}-{name}" + (f".{number}" if number else "")) not in taken
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
        for step in self.whole():
            with contextlib.suppress(AnyrankError):
                found.append(describe(self.examine(step.name)[0], self.shown(step.name)))
        return found
