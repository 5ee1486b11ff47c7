"""`anyrank.json`: the contents of a step of a run, with its own checksum."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.block_sums import sums_bytes, sums_name
from anyrank.files.json_codec import reading_record
from anyrank.files.storage import FileRecord, Storage, join_path, read_whole, record_of

MANIFEST = "anyrank.json"
FORMAT = "anyrank run"
VERSION = 1  # of the format, independent of the package's version
MAX_BYTES = 1 << 30
SELF = ',\n "self": '  # starts the last line but one
STEP = re.compile(r"^step-(\d+)$")  # anchored: step-3.tmp-... and .aside-... are not steps


# These change how an optimizer computes its step, not the result: a resume uses the script's
# values.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that one rank wrote.

    Attributes:
        size: bytes of its data file, whose checksums are in a file next to it.
        index: record of its index.
    """

    size: int
    index: FileRecord

    def sizes(self, rank: int) -> dict[str, int]:
        """Map the names of the files of a rank to their sizes."""
        data = data_name(rank)
        sums = sums_name(data)
        return {data: self.size, sums: sums_bytes(self.size), index_name(rank): self.index.size}


@dataclass(frozen=True)
class Manifest:
    """A committed step.

    Attributes:
        run: id of the run, the same after every resume.
        step, epoch, samples: progress of the run, in optimizer steps, epochs and samples.
        saved_on: number of ranks, and how the tensors were laid out on them.
        lineage: one entry per resume: the step, the number of ranks, and the skipped parts.
        written: time of the commit, in ISO 8601.
        versions: versions of anyrank and torch.
        files: name -> record, for the files of the step as a whole.
        ranks: the files that each rank wrote, by its index.
        parts: name -> the saved state of a part, without its tensors.
        settings: part -> the script's own settings for it, before anything was restored.
        differed: tensors that were not the same on every rank; the first rank's values were saved.
        generators: the random generators: which ranks had the same state, and the states that were
            the same on every rank; see `SavedGenerators`.
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
    ranks: list[RankFiles]
    parts: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    differed: list[str] = field(default_factory=list[str])
    generators: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def identity(self) -> tuple[str, int, str]:
        """The run, the step and the time of the commit, by which copies of a step are recognized.

        A run that returned to an earlier step may save a step of the same number again.
        """
        return self.run, self.step, self.written

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every listed file of the step, by name."""
        sizes = {name: record.size for name, record in self.files.items()}
        for rank, files in enumerate(self.ranks):
            sizes |= files.sizes(rank)
        return sizes

    def to_bytes(self) -> bytes:
        """Return the content of the file; its last field is the xxh3-128 of all bytes before it."""
        entries: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        entries |= {field.name: getattr(self, field.name) for field in fields(self)}
        entries["files"] = {name: asdict(record) for name, record in self.files.items()}
        entries["ranks"] = [
            (files.size, files.index.size, files.index.xxh3_64) for files in self.ranks
        ]
        lines = [f" {json.dumps(name)}: {_value(name, value)}" for name, value in entries.items()]
        text = ("{\n" + ",\n".join(lines)).encode()
        return text + _end(text)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Read the manifest of a step's folder.

    Raises:
        CorruptCheckpoint: the manifest is missing, is not JSON, lacks fields, was changed, or
            belongs to a different step than the folder's name says.
        CheckpointError: it has a different format version, or cannot be read.
    """
    manifest = parse(read_small(storage, folder, MANIFEST), join_path(folder, MANIFEST))
    name = folder.rstrip("/").rpartition("/")[2]
    if STEP.match(name) and name != step_name(manifest.step):
        raise CorruptCheckpoint(
            f"{folder}: its manifest belongs to step {manifest.step}. Rename the folder to "
            f"{step_name(manifest.step)}, or remove it if it is a copy."
        )
    return manifest


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def parse(data: bytes, path: str) -> Manifest:
    """Parse a manifest from bytes; raise the errors of `read_manifest`."""
    text = data.rpartition(SELF.encode())[0]
    if data != text + _end(text):
        raise CorruptCheckpoint(
            f"{path}: does not match its own checksum. The file is corrupt; restore it from a "
            "copy, or use an older step."
        )
    with reading_record(path):
        entries = json.loads(data)
        if entries["format"] != FORMAT:
            raise CorruptCheckpoint(f"{path}: its format is {entries['format']!r}, not {FORMAT!r}")
        if entries["version"] != VERSION:
            raise CheckpointError(
                f"{path}: has format version {entries['version']!r}, but this anyrank reads "
                f"version {VERSION}. Resume with the anyrank that wrote it, or a newer one."
            )
        return _manifest(entries)


def _manifest(entries: dict[str, Any]) -> Manifest:
    """Build the manifest from the entries of the JSON object that a save wrote.

    Raises an error for a value of a wrong kind, or a file name that leads out of the folder.
    """
    values: dict[str, Any] = {
        field.name: entries[field.name] for field in fields(Manifest) if field.name in entries
    }
    values |= {name: int(entries[name]) for name in ("step", "epoch", "samples")}
    values |= {
        name: dict(entries[name]) for name in ("parts", "settings", "generators", "versions")
    }
    values["lineage"] = [dict(entry) for entry in entries["lineage"]]
    values["differed"] = [str(name) for name in entries["differed"]]
    saved_on = entries["saved_on"]
    values["saved_on"] = {"ranks": int(saved_on["ranks"]), "layout": str(saved_on["layout"])}
    if not re.fullmatch("[0-9a-f]{1,64}", entries["run"]):  # it is used in folder names
        raise ValueError(f"run: {entries['run'][:40]!r} is not a run id")
    files = {name: FileRecord(**record) for name, record in entries["files"].items()}
    for name in files:
        if name == ".." or "/" in name or "\\" in name:
            raise ValueError(f"files: {name[:40]!r} is outside the step's folder")
    values["files"] = files
    values["ranks"] = [
        RankFiles(_size(size), FileRecord(_size(index_size), str(checksum)))
        for size, index_size, checksum in entries["ranks"]
    ]
    if not values["ranks"]:
        raise ValueError("ranks: is empty")
    if len(values["ranks"]) != values["saved_on"]["ranks"]:
        raise ValueError(
            f"ranks: has {len(values['ranks'])} entries, but saved_on says "
            f"{values['saved_on']['ranks']}"
        )
    return Manifest(**values)


def _size(number: Any) -> int:
    """Return a number of bytes; raise ValueError for anything else."""
    if type(number) is not int or number < 0:
        raise ValueError(f"ranks: {number!r:.40} is not a number of bytes")
    return number


def _value(name: str, value: Any) -> str:
    """Return a field as JSON: indented for people, except lists with an entry for each rank."""
    if name in ("ranks", "generators"):
        return json.dumps(value, separators=(",", ":"))
    return json.dumps(value, indent=1).replace("\n", "\n ")


def data_name(rank: int) -> str:
    """Name a rank's data file as DCP does, because DCP's readers expect that name."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """Return the name of the index of a rank's data file."""
    return f"__{rank}_0.json"


def read_small(
    storage: Storage, folder: str, name: str, expected: FileRecord | None = None
) -> bytes:
    """Read a small file of a step, and compare it with its record if it has one.

    Raises:
        CorruptCheckpoint: the file is missing, or its bytes differ from the saved ones.
        CheckpointError: it cannot be read; chained to the storage's error.
    """
    path = join_path(folder, name)
    try:
        data = read_whole(storage, path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptCheckpoint(
            f"{path}: is missing or not a regular file. The step is corrupt; restore the file from "
            "a copy, or use an older step."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except LoadError as error:  # it already names the path and the byte
        raise CheckpointError(str(error)) from error
    if expected is not None:
        actual = record_of(data)
        if (actual.size, actual.xxh3_64) != (expected.size, expected.xxh3_64):
            raise CorruptCheckpoint(
                f"{path}: has {actual.size} bytes with checksum {actual.xxh3_64}, but the manifest "
                f"lists {expected.size} bytes with {expected.xxh3_64}. The file is corrupt; "
                "restore it from a copy, or use an older step."
            )
    return data


def _end(text: bytes) -> bytes:
    """Return the end of a manifest: the digest of its text, and the closing brace."""
    import xxhash  # only runs need it

    return f'{SELF}"{xxhash.xxh3_128_hexdigest(text)}"\n}}\n'.encode()
