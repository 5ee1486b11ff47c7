"""A run's folder: its names, the commit, the retention of old steps, and the cleanup.

A step is written under `step-N.tmp-<run>-<tag>` and renamed when it is complete. Object stores
cannot rename: there a step is written in place, and its manifest, written last, is the commit.
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
from anyrank.runs.adopt.folders import find_other_content
from anyrank.sources.run_step import (
    ASIDE,
    SavedStep,
    StepFolder,
    check_sizes,
    describe,
    is_step,
    list_steps,
    number_of,
)

log = logging.getLogger("anyrank.saving")

LATEST = "latest"
TEMPORARY = re.compile(r"^step-(\d+)\.tmp-([0-9a-f]+)-([0-9a-f]+)$")
REMOVED = ".removed-"
DAMAGED = "damaged"
SUPERSEDED = "superseded"
MIN_KEPT = 2  # because the newest may turn out to be corrupt


class RunFolder:
    """The folder of one run. Only the first rank changes it by these methods; each rank writes its
    own files of a step by `write_share`, and any rank may read.

    Attributes:
        path: the path as the user gave it, for messages.
        absolute_path: stays valid if the process changes its working directory.
    """

    def __init__(self, store: Storage, path: str) -> None:
        self.store = store
        self.path = path
        self.absolute_path = absolute(path)

    def join(self, name: str) -> str:
        """Return the absolute path of a name in the folder."""
        return join_path(self.absolute_path, name)

    def user_path(self, name: str) -> str:
        """Return a name's path in the user's form, if that still leads to the same folder."""
        path = join_path(self.path, name)
        return path if absolute(path) == self.join(name) else self.join(name)

    def names(self) -> list[str]:
        """List the names in the folder; an empty list if it does not exist.

        Raises:
            CheckpointError: the storage cannot list it.
        """
        with reading(self.path):
            try:
                return self.store.names(self.absolute_path)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def steps(self) -> list[StepFolder]:
        """List the run's steps, newest first: complete ones, and corrupt ones without a manifest.

        In an object store a step without a manifest was left by an interrupted save, and is not
        listed.

        Raises:
            CheckpointError: the storage cannot list the folder.
        """
        with reading(self.path):
            steps = list_steps(self.store, self.absolute_path, self.names())
        return [step for step in steps if step.is_whole or self.store.renames]

    def whole_steps(self) -> list[StepFolder]:
        """Return the `steps` that have their manifest."""
        return [step for step in self.steps() if step.is_whole]

    def check_no_other(self) -> None:
        """Check that a folder without steps can hold a new run.

        Raises:
            CheckpointError: it is a file, a step of a run, a folder of runs or another tool's
                checkpoint; has the name of a step in a run's folder; or cannot be made.
        """
        if self.whole_steps():
            return  # they belong to a run, and `check_run` checks to which
        with reading(self.path):
            problem = self._find_other_content()
            problem = problem or self._find_parent_run() or self._find_write_problem()
        if problem is not None:
            raise CheckpointError(f"{self.path}: {problem}")

    def _find_other_content(self) -> str | None:
        """Describe content of the folder that does not belong to a run; None if there is none."""
        if not self.names() and not self.store.is_file(self.absolute_path):
            return None
        # In an object store an interrupted save leaves files under the step's name.
        own_names = TEMPORARY if self.store.renames else STEP
        return find_other_content(self.store, self.absolute_path, own_names)

    def _find_parent_run(self) -> str | None:
        """Return the problem of a folder that is, or is inside, a step of another run; or None."""
        parent, where = self.absolute_path.rstrip("/"), "is"
        while parent:
            parent, _, name = parent.rpartition("/")
            number = number_of(name)
            is_of_run = number is not None and self.store.is_dir(parent)
            if is_of_run and list_steps(self.store, parent, self.store.names(parent)):
                way_out = f"Pass {parent}; to return to that step, call resume({number})."
                return f"{where} step {number} of the run {parent}. {way_out}"
            where = "is inside"
        return None

    def _find_write_problem(self) -> str | None:
        """Return why a save could not make its folder, before hours of training; or None."""
        if not self.store.renames:
            return None
        path = self.absolute_path
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            return f"cannot be made, because {path} is a file. Pass a different path."
        if not os.access(path, os.W_OK | os.X_OK):
            return (
                f"cannot be made, because this user may not write in {path}. Change its "
                "permissions, or pass a different path."
            )
        return None

    def begin(self, step: int, run: str, branch: int | None = None) -> str:
        """Clean up after interrupted saves of this run, and make an empty folder for a step.

        Args:
            step: the step to write.
            run: the run's id.
            branch: step that the run returned to, so that newer ones are set aside; or None.

        Raises:
            CheckpointError: the step already exists; or the folder cannot be made.
        """
        with storing(self.path):
            self.store.make_folder(self.absolute_path)
            self._clean(run)
            if branch is not None:  # first, because the step to write may be among them
                self._set_newer_aside(branch)
            step_path = self.join(step_name(step))
            if is_step(self.store, step_path):
                raise CheckpointError(
                    f"{step_path}: is already saved, and a saved step is never overwritten. Save "
                    "again after the next step_done(), or use a different folder for a different "
                    "run."
                )
            if not self.store.renames:
                return step_path
            if self.store.is_dir(step_path):
                new_name = self.set_aside(step_name(step), DAMAGED)
                log.warning(
                    "%s: was incomplete (no manifest) and was renamed to %s", step_path, new_name
                )
            # A rank of an interrupted save may still write: no later save shares its folder.
            path = f"{step_path}.tmp-{run[:8]}-{uuid.uuid4().hex[:8]}"
            self.store.make_folder(path)
            return path

    def check_run(self, run: str | None) -> None:
        """Check that a folder is not of another run.

        Raises:
            CheckpointError: the newest undamaged step is of another run, or cannot be read.
        """
        for step, name, _ in self.steps():
            try:
                step_run = read_manifest(self.store, self.join(name)).run
            except CorruptCheckpoint:
                continue  # it does not say to which run it belongs, but an older one does
            if step_run != run:
                raise CheckpointError(
                    f"{self.path}: contains step {step} of a different run ({step_run[:8]}). To "
                    "continue that run, call resume() before the first save; to start a new run, "
                    "use an empty folder."
                )
            return

    def _clean(self, run: str) -> None:
        """Remove the leftovers of interrupted saves of this run, and of a killed retention.

        A run without steps has no lasting id, so all interrupted saves count as its own. In an
        object store, all steps without a manifest are interrupted saves, because the folder has one
        writer.
        """
        names = self.names()
        leftovers = [name for name in names if name.startswith(REMOVED)]
        is_first = not self.steps()
        for name in names:
            match = TEMPORARY.match(name)
            if match and (is_first or match[2] == run[:8]):
                leftovers.append(name)
        for name in leftovers:
            with contextlib.suppress(OSError):  # leftovers take room, but prevent no save
                self.store.remove_folder(self.join(name))
        if not self.store.renames:
            for step in list_steps(self.store, self.absolute_path, names):
                if not step.is_whole:
                    self.store.remove_folder(self.join(step.name))

    def commit(self, temporary: str, step: int, manifest: Manifest) -> str:
        """Commit a written step, so that it survives a power failure; return its name."""
        write_file(self.store, join_path(temporary, MANIFEST), manifest.to_bytes())
        name = step_name(step)
        if self.store.renames:
            with storing(self.path):
                # A step that exists must be complete after a power failure: its entries come first.
                self.store.sync_folder(temporary)
                self.store.rename(temporary, self.join(name))
                self.store.sync_folder(self.absolute_path)
        return name

    def tidy(self, name: str, keep_newest: int, keeps_forever: Callable[[int], bool]) -> list[str]:
        """After a commit: write the `latest` hint, and remove old steps. Failures are warnings.

        At least two steps are kept whose files exist with their sizes; their bytes are compared
        when they are read.
        """
        removed: list[str] = []
        try:
            self._write_latest(name)
            steps = self.whole_steps()
            newest, older = steps[:keep_newest], steps[keep_newest:]
            # A step that bit rot has shortened must not take the place of a good one.
            removable = [step.name for step in older if not keeps_forever(step.number)]
            if removable and self._has_enough_good([step.name for step in newest], name):
                for folder in removable:
                    self._remove(folder)
                    removed.append(folder)
        except (OSError, AnyrankError) as error:
            log.warning("%s: old steps could not be removed: %s", self.path, error)
        return removed

    def _has_enough_good(self, names: Sequence[str], committed: str) -> bool:
        """Return True if at least MIN_KEPT of these steps are good; examine no more than that many,
        and not the one that was just committed.
        """
        good = (name for name in names if name == committed or self._is_good(name))
        return len([*itertools.islice(good, MIN_KEPT)]) == MIN_KEPT

    def _is_good(self, name: str) -> bool:
        try:
            manifest = read_manifest(self.store, self.join(name))
            check_sizes(self.store, self.join(name), manifest)
        except (OSError, AnyrankError):
            return False
        return True

    def _remove(self, name: str) -> None:
        """Remove a step; a kill in the middle leaves nothing that looks like a complete step."""
        if self.store.renames:
            hidden = self.join(f"{REMOVED}{name}-{uuid.uuid4().hex[:8]}")
            self.store.rename(self.join(name), hidden)
            self.store.remove_folder(hidden)
            return
        self.store.remove(join_path(self.join(name), MANIFEST))
        self.store.remove_folder(self.join(name))

    def _write_latest(self, name: str) -> None:
        """Write the `latest` file, a hint for people and scripts; anyrank does not read it."""
        if not self.store.renames:
            write_file(self.store, self.join(LATEST), f"{name}\n".encode())
            return
        # Meanwhile readers see the old name or the new one, and always a complete one.
        temporary = self.join(f".{LATEST}-{uuid.uuid4().hex[:8]}")
        write_file(self.store, temporary, f"{name}\n".encode())
        self.store.rename(temporary, self.join(LATEST))

    def _set_newer_aside(self, branch: int) -> None:
        """Rename the steps after the one that the run returned to."""
        newer = [step for step in self.steps() if step.number > branch]
        new_names = [self.set_aside(s.name, SUPERSEDED if s.is_whole else DAMAGED) for s in newer]
        if new_names:
            log.warning(
                "%s: the run continues from step %d; newer steps were renamed to %s",
                self.path,
                branch,
                ", ".join(new_names),
            )

    def set_aside(self, name: str, reason: str) -> str:
        """Rename a step to `.aside-<reason>-<name>`, which is not a step; return the new name."""
        names = set(self.names())
        new_name = next(
            free
            for number in range(len(names) + 2)
            if (free := f"{ASIDE}{reason}-{name}" + (f".{number}" if number else "")) not in names
        )
        with storing(self.path):
            self.store.rename(self.join(name), self.join(new_name))
        return new_name

    def examine(self, name: str) -> tuple[Manifest, bytes]:
        """Check the sizes of a step's files; return its manifest and the bytes of its index.

        Raises:
            CorruptCheckpoint: a file is missing or is not what was written.
            CheckpointError: the storage cannot read it.
        """
        path = self.join(name)
        with reading(path):
            manifest = read_manifest(self.store, path)
            return manifest, check_sizes(self.store, path, manifest)

    def saved(self) -> list[SavedStep]:
        """List the committed steps, newest first, without corrupt ones."""
        steps: list[SavedStep] = []
        for step in self.whole_steps():
            with contextlib.suppress(AnyrankError):
                steps.append(describe(self.examine(step.name)[0], self.user_path(step.name)))
        return steps
