"""`anyrank.verify`: check that a source is complete and not corrupt, without a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from anyrank.checks import check_bool
from anyrank.errors import AnyrankError, LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import FORMAT, MANIFEST, read_manifest
from anyrank.files.progress import Progress, progress_of_tool
from anyrank.files.storage import Storage, join_path, storage_for
from anyrank.loading.checksums import bytes_to_compare, compared, mismatches
from anyrank.sources.dcp_seal import check_seal
from anyrank.sources.endings import format_of
from anyrank.sources.readers.folders import RUN, looks_like
from anyrank.sources.readers.runs import no_step
from anyrank.sources.run_step import METADATA, check_sizes, is_step, list_steps
from anyrank.sources.source import Source, check_source, list_source
from anyrank.sources.step_listing import list_step
from anyrank.sources.tables.table_names import whole_keys
from anyrank.tools.inspect.inspect import name_of
from anyrank.tools.inspect.stream import boxes_of, count_nonfinite, open_values
from anyrank.tools.inspect.tool_folders import is_tool_folder, with_optimizers
from anyrank.wording import count, in_units, printable, rows

SHOWN = 20


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One problem that `verify` found.

    Attributes:
        where: the file or the tensor.
        what: what was expected and found, and how to fix it.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.what}")


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`. `print` it for a summary; it is true if nothing is wrong.

    Attributes:
        path: the source, as passed.
        format: its format; "" if unknown.
        findings: all problems.
        tensors: number of checked tensors; for a run, in all steps together.
        nbytes: their size in bytes.
        checked: texts about what was checked, and about missing checksums.
        steps: for a run, the steps that were checked.
    """

    path: str
    format: str
    findings: list[VerifyFinding]
    tensors: int
    nbytes: int
    checked: list[str]
    steps: list[int]

    def __bool__(self) -> bool:
        return not self.findings

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        verdict = count(len(self.findings), "finding") if self.findings else "fine"
        parts = [self.format, count(self.tensors, "tensor"), in_units(self.nbytes)]
        if self.steps:
            parts.insert(1, count(len(self.steps), "step"))
        lines = [f"{self.path}: {verdict}", f"  {', '.join(part for part in parts if part)}"]
        lines += rows([("", self.findings)], 0, SHOWN)
        return "\n".join([*lines, f"  checked: {', '.join(self.checked)}"])


def verify(source: Source, *, finite: bool = False) -> VerifyReport:
    """Read all of a source, and report what is wrong with it.

    Checks structure, sizes and offsets, and that the index matches the files. Then verifies every
    stored checksum: CRC-32 of torch files and DCP, SHA-256 of Hugging Face downloads, and for a run
    the manifest and the xxh3-64 of each block, in every committed step. In a folder of another tool
    (Trainer, Accelerate, DeepSpeed, one file per rank), also checks the optimizers and the files of
    all ranks. Uses a few MiB of memory.

    Any process may call it; does not communicate.

    Example::

        torch.save({"weight": torch.zeros(300, 2)}, "w.pt")
        assert anyrank.verify("w.pt")
        with open("w.pt", "r+b") as file:
            file.seek(1000)
            file.write(b"x")
        print(anyrank.verify("w.pt").findings)

    Args:
        source: a path or URL, a list of files, or a dict of tensors; as for `load`.
        finite: whether to look for NaN and infinite values in every tensor too.

    Returns:
        The report, which is true if nothing is wrong.

    Raises:
        LoadError: the source does not exist, or cannot be read.
        TypeError: the source is not a path, a list of paths or a dict of tensors, or `finite` is
            not a bool.
    """
    check_source(source)
    check_bool(finite=finite)
    outcome = _Outcome([], set())
    path = name_of(source)
    if isinstance(source, (str, os.PathLike)):
        storage = storage_for(path)
        names = _names(storage, path)
        if names is not None and looks_like(RUN, names):
            return _verify_run(storage, path, names, finite, outcome)
    try:
        listing = list_source(source)
    except AnyrankError as error:
        outcome.findings.append(_finding(error, path))
        _verify_each(source, outcome)
        return VerifyReport(path, "", outcome.findings, 0, 0, ["structure"], [])
    unreadable = listing.unreadable
    listing = listing.with_tensors(whole_keys(listing))
    if is_tool_folder(source):
        try:
            listing = with_optimizers(source, listing)
        except AnyrankError as error:
            outcome.findings.append(_finding(error, path))
    _verify_listings([listing], finite, outcome)
    for name, what in unreadable.items():
        outcome.findings.append(VerifyFinding(path, f"{name}: is {what}; it was not checked"))
    return _report(path, listing.format, outcome, [listing], [])


@dataclass
class _Outcome:
    """The findings, and texts about what was checked."""

    findings: list[VerifyFinding]
    checked: set[str]


def _names(storage: Storage, path: str) -> list[str] | None:
    """Return the names in a folder; None for a file.

    Raises:
        LoadError: the path does not exist, or cannot be read.
    """
    try:
        if storage.is_dir(path):
            return storage.names(path)
        if storage.is_file(path):
            return None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    raise LoadError(f"{path}: does not exist (working directory {os.getcwd()})")


def _finding(error: Exception, path: str) -> VerifyFinding:
    text = str(error)
    where, colon, what = text.partition(": ")
    is_path = colon and (where.startswith(path) or os.sep in where)
    return VerifyFinding(where, what) if is_path else VerifyFinding(path, text)


def _verify_each(source: Source, outcome: _Outcome) -> None:
    """Check every file of a corrupt source separately, to find all problems."""
    paths: list[str] = []
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        storage = storage_for(path)
        if storage.is_dir(path):
            names = [name for name in storage.names(path) if format_of(name) is not None]
            paths = [join_path(path, name) for name in names]
    elif not isinstance(source, Mapping):
        paths = [os.fspath(path) for path in source]
    known = {finding.where for finding in outcome.findings}
    for path in paths:
        try:
            listing = list_source(path)
        except AnyrankError as error:
            if path not in known:
                outcome.findings.append(_finding(error, path))
        else:
            _verify_listings([listing], False, outcome)


def _verify_run(
    storage: Storage, path: str, names: list[str], finite: bool, outcome: _Outcome
) -> VerifyReport:
    """Check every committed step against its manifest."""
    folders = [path] if MANIFEST in names else []
    if not folders:
        folders = [join_path(path, step.name) for step in list_steps(storage, path, names)]
    if not folders:
        outcome.findings.append(VerifyFinding(path, no_step(names)))
    steps: list[int] = []
    listings: list[Listing] = []
    for folder in folders:
        try:
            if not is_step(storage, folder):
                outcome.findings.append(
                    VerifyFinding(
                        folder, f"has no {MANIFEST}; it is corrupt, or its save was killed"
                    )
                )
                continue
            manifest = read_manifest(storage, folder)
            steps.append(manifest.step)
            index = check_sizes(storage, folder, manifest)
            listing = list_step(storage, folder, manifest.ranks, index).listing
            outcome.checked.add(_verify_metadata(storage, folder, manifest.step))
        except AnyrankError as error:
            outcome.findings.append(_finding(error, folder))
            continue
        listings.append(listing)
    _verify_listings(listings, finite, outcome)
    outcome.checked.add("manifests")
    return _report(path, FORMAT, outcome, listings, steps)


def _verify_metadata(storage: Storage, folder: str, step: int) -> str:
    """Check the file of a step that only torch.distributed.checkpoint reads.

    Returns:
        A text about what was checked.

    Raises:
        CorruptCheckpoint: the file is not the one that was written.
        LoadError: the file cannot be read.
    """
    path = join_path(folder, METADATA)
    try:
        if storage.find(path) is None:
            return f"no {METADATA} in step {step}, which only torch.distributed.checkpoint reads"
        check_seal(storage, path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    return METADATA


def _report(
    path: str, name: str, outcome: _Outcome, listings: list[Listing], steps: list[int]
) -> VerifyReport:
    return VerifyReport(
        path,
        name,
        outcome.findings,
        sum(len(listing.tensors) for listing in listings),
        sum(listing.nbytes for listing in listings),
        ["structure", *sorted(outcome.checked)],
        steps,
    )


def _verify_listings(listings: list[Listing], finite: bool, outcome: _Outcome) -> None:
    total = sum(bytes_to_compare(listing) + finite * listing.nbytes for listing in listings)
    with progress_of_tool("verifying", total) as progress:
        for listing in listings:
            try:
                for path, what in mismatches(listing, progress=progress.add):
                    outcome.findings.append(VerifyFinding(path, what))
            except AnyrankError as error:
                outcome.findings.append(_finding(error, listing.format))
            if finite:
                outcome.findings += _nonfinite(listing, progress)
    outcome.checked.update(compared(*listings) or ["no checksums, because the files have none"])
    if finite:
        outcome.checked.add("NaN and infinite values")


def _nonfinite(listing: Listing, progress: Progress) -> Iterator[VerifyFinding]:
    with open_values(listing) as values:
        for name, stored in listing.tensors.items():
            if not (stored.dtype.is_floating_point or stored.dtype.is_complex):
                continue
            try:
                bad = sum(count_nonfinite(values.read(stored, b)) for b in boxes_of(stored))
            except AnyrankError as error:
                yield _finding(error, name)
                continue
            progress.add(stored.nbytes)
            if bad:
                yield VerifyFinding(name, f"{bad} of {stored.numel} values are NaN or infinite")
