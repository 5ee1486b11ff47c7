"""`anyrank.json`: what a step of a run consists of, its own checksum included."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.local import NotAFile
from anyrank.files.optimizer_numbers import RECORD, is_optimizer, optimizer_numbers
from anyrank.files.schema import ANY, COUNT, DIGEST, Optional, Table, check
from anyrank.files.storage import Storage, Written, digest_of, join_path, read_range

MANIFEST = "anyrank.json"
FORMAT = "anyrank run"
VERSION = 1  # of the format, apart from the package's
MAX_BYTES = 1 << 30
STEP = re.compile(r"^step-(\d+)$")  # anchored: step-3.tmp-... and .aside-... are no steps


@dataclass(frozen=True)
class FileRecord:
    """One file of a step.

    Attributes:
        size: bytes.
        xxh3_64: of a small file, in hex.
        blocks: of a data file: the name of the file with the checksums of its blocks.
    """

    size: int
    xxh3_64: str = ""
    blocks: str = ""


STREAMS = {
    "ranks": [{"data_index": COUNT, "data_size": COUNT, "streams": Table(str)}],
    "states": Table({"algorithm": str, "values": [ANY], "data": str}),
    "unused": [str],
}
FIELDS = {
    "run": str,
    "step": COUNT,
    "epoch": COUNT,
    "samples": COUNT,
    "saved_on": {"ranks": COUNT, "layout": str},
    "lineage": [{"step": COUNT, "ranks": COUNT, "skipped": Optional([str])}],
    "written": str,
    "versions": Table(str),
    "files": Table({"size": COUNT, "xxh3_64": Optional(DIGEST), "blocks": Optional(str)}),
    "parts": Table(ANY),
    "differed": [str],
    "streams": STREAMS,
    "receipt": Optional({"digest": str, "tensors": Table(DIGEST), "numbers": Optional(Table(ANY))}),
}
# What a receipt's digest takes from the state of the loader.
POSITION = {"seed": int, "epoch": COUNT, "step": COUNT, "samples": COUNT, "receipt": [ANY]}


@dataclass(frozen=True)
class Manifest:
    """A committed step.

    Attributes:
        run: id of the run, the same over all its resumes.
        step, epoch, samples: how far the run is, in optimizer steps, epochs and samples.
        saved_on: ranks, and how the tensors lay on them.
        lineage: for each time the run was resumed: from which step, on how many ranks, and which
            parts were skipped.
        written: time of the commit, in ISO 8601.
        versions: of anyrank and torch.
        files: name -> record, for every other file of the folder.
        parts: name -> what is saved of a part of the state, apart from its tensors.
        differed: tensors that were not alike on all ranks; the first rank's were saved.
        streams: the random streams: `ranks`, for each rank its data-parallel coordinate and the
            digest of each stream's state; `states`, digest -> state.
        receipt: of a run with exact=True: `tensors`, name -> digest of its values in any layout,
            `numbers`, those of its optimizers, and `digest`, of both and of the data up to the
            step; empty for other runs. Earlier receipts lack the numbers.
    """

    run: str
    step: int
    epoch: int
    samples: int
    saved_on: dict[str, Any]
    lineage: list[dict[str, Any]]
    written: str
    versions: dict[str, str]
    files: dict[str, FileRecord]
    parts: dict[str, Any]
    differed: list[str] = field(default_factory=list[str])
    streams: dict[str, Any] = field(
        default_factory=lambda: {"ranks": [], "states": {}, "unused": []}
    )
    receipt: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def data_state(self) -> dict[str, Any]:
        """The state of the loader, of a step with a receipt."""
        state: dict[str, Any] = self.parts["data"]["tree"]
        return state

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of the optimizers, as a receipt has them."""
        return optimizer_numbers(self.parts)

    def to_bytes(self) -> bytes:
        """The file's bytes; the last field is the xxh3-128 of the others."""
        table: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        table |= {field.name: getattr(self, field.name) for field in fields(self)}
        table["files"] = {
            name: {key: value for key, value in asdict(record).items() if value != ""}
            for name, record in self.files.items()
        }
        if not self.receipt:
            del table["receipt"]
        table["self"] = _digest(table)
        return _text(table)


def record(written: Written) -> FileRecord:
    """The manifest's record of a file."""
    return FileRecord(written.size, written.digest)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a step's folder.

    Raises:
        CorruptCheckpoint: it is not there, not JSON, lacks fields, is not what was written, or is
            that of another step than the folder's name says.
        CheckpointError: another format version, or it cannot be read.
    """
    manifest = parse(read_small(storage, folder, MANIFEST), join_path(folder, MANIFEST))
    name = folder.rstrip("/").rpartition("/")[2]
    if STEP.match(name) and name != step_name(manifest.step):
        raise CorruptCheckpoint(
            f"{folder}: its manifest is that of step {manifest.step}: rename the folder to "
            f"{step_name(manifest.step)}, or remove it if it is a copy"
        )
    return manifest


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def parse(data: bytes, path: str) -> Manifest:
    """As `read_manifest`, from bytes."""
    try:
        table = json.loads(data)
        digest = table.pop("self", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not a manifest ({error}): the file is damaged") from (
            error
        )
    if digest != _digest(table):
        raise CorruptCheckpoint(f"{path}: does not match its own checksum: the file is damaged")
    try:
        check(table, {"format": str, "version": COUNT}, "the manifest")
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: {error}: it is not a manifest of a run") from error
    if table["format"] != FORMAT:
        raise CorruptCheckpoint(f"{path}: its format is {table['format']!r}, not {FORMAT!r}")
    if table["version"] != VERSION:
        raise CheckpointError(
            f"{path}: has format version {table['version']}, this anyrank reads {VERSION}: "
            "resume with the anyrank that wrote it, or a newer one"
        )
    if data != _text(table | {"self": digest}):  # 1E5 for 1e5: another byte, and the same value
        raise CorruptCheckpoint(f"{path}: has other bytes than were written: the file is damaged")
    try:
        check(table, FIELDS, "the manifest")
        if "receipt" in table:
            check(table["parts"], {"data": {"tree": POSITION}}, "the manifest.parts")
            for part, each in table["parts"].items():
                if is_optimizer(each):
                    check(each, RECORD, f"the manifest.parts.{part}")
        if not table["saved_on"]["ranks"]:
            raise ValueError("the manifest.saved_on.ranks: 0 ranks saved nothing")
        names = [field.name for field in fields(Manifest)]
        values = {name: table[name] for name in names if name in table}
        values["files"] = {name: FileRecord(**record) for name, record in values["files"].items()}
        if not re.fullmatch("[0-9a-f]{1,64}", table["run"]):  # it becomes a part of folders' names
            raise ValueError(f"the manifest.run: {table['run'][:40]!r} is not an id of a run")
        _check_files(values["files"])
        return Manifest(**values)
    except (TypeError, ValueError) as error:  # TypeError: a field of a file that there is not
        raise CorruptCheckpoint(f"{path}: {error}: the file is damaged") from error


def _check_files(files: Mapping[str, FileRecord]) -> None:
    """Every file is in the step's folder, and has a checksum: its own, or those of its blocks in
    another file.

    Raises:
        ValueError: names the first that is wrong.
    """
    for name, record in files.items():
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(
                f"the manifest.files: {name[:40]!r} is not a file of the step's folder"
            )
        other = files.get(record.blocks)
        if bool(record.xxh3_64) == bool(record.blocks) or (
            record.blocks and not (other and other.xxh3_64)
        ):
            raise ValueError(f"the manifest.files.{name}: has not one checksum")


def read_small(
    storage: Storage, folder: str, name: str, known: Mapping[str, FileRecord] | None = None
) -> bytes:
    """A small file of a step, whole, and compared with its record where there is one.

    Raises:
        CorruptCheckpoint: it is not there, or its bytes are not those that were written.
        CheckpointError: it cannot be read; chained to the storage's error.
    """
    path = join_path(folder, name)
    try:
        with closing(storage.open(path)) as file:
            size = file.info.size
            if size > MAX_BYTES:
                raise CorruptCheckpoint(f"{path}: {size} bytes is too long for this file")
            data = read_range(file, path, 0, size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpoint(f"{path}: is missing: the step is damaged") from error
    except (NotAFile, IsADirectoryError) as error:
        raise CorruptCheckpoint(f"{path}: is not a regular file: the step is damaged") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except LoadError as error:  # it names the path and the byte
        raise CheckpointError(str(error)) from error
    expected = None if known is None else known[name]
    if expected is not None:
        found = digest_of(data)
        if (found.size, found.digest) != (expected.size, expected.xxh3_64):
            raise CorruptCheckpoint(
                f"{path}: {found.size} bytes with checksum {found.digest}, the manifest says "
                f"{expected.size} with {expected.xxh3_64}: the file is damaged"
            )
    return data


def _text(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=1) + "\n").encode()


def _digest(table: Mapping[str, Any]) -> str:
    import xxhash  # only runs need it

    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
