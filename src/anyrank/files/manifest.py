"""`anyrank.json`: the contents of a step of a run, including its own checksum."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.block_sums import sums_bytes, sums_name
from anyrank.files.json_codec import reading_record
from anyrank.files.storage import FileRecord, Storage, digest_of, join_path, read_whole

MANIFEST = "anyrank.json"
FORMAT = "anyrank run"
VERSION = 1  # of the format, independent of the package's
MAX_BYTES = 1 << 30
SELF = ',\n "self": '  # begins the last line but one
STEP = re.compile(r"^step-(\d+)$")  # anchored: step-3.tmp-... and .aside-... are not steps


# How an optimizer's step is computed, not what: a resumed run uses the script's current choice.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that one rank wrote.

    Attributes:
        size: bytes of its data file, whose checksums lie beside it.
        index: record of its index.
    """

    size: int
    index: FileRecord

    def sizes(self, rank: int) -> dict[str, int]:
        """Name -> bytes of each, of the rank of this index."""
        data = data_name(rank)
        sums = sums_name(data)
        return {data: self.size, sums: sums_bytes(self.size), index_name(rank): self.index.size}


@dataclass(frozen=True)
class Manifest:
    """A committed step.

    Attributes:
        run: id of the run, the same over all its resumes.
        step, epoch, samples: progress of the run, in optimizer steps, epochs and samples.
        saved_on: ranks, and how the tensors were laid out on them.
        lineage: one entry per resume: the step, the number of ranks, and the skipped parts.
        written: time of the commit, in ISO 8601.
        versions: versions of anyrank and torch.
        files: name -> record, for the files of the step as a whole.
        ranks: the files that each rank wrote, by its index.
        parts: name -> the saved state of a part, apart from its tensors.
        settings: part -> the script's own settings for it, before anything was restored.
        differed: tensors that were not equal on all ranks; the first rank's were saved.
        generators: the random generators: which ranks had the same state, and the states that all
            ranks shared; see `SavedGenerators`.
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

        A run that went back to an earlier step may save a step of the same number again.
        """
        return self.run, self.step, self.written

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file of the step that is listed here, by name."""
        sizes = {name: record.size for name, record in self.files.items()}
        for rank, files in enumerate(self.ranks):
            sizes |= files.sizes(rank)
        return sizes

    def to_bytes(self) -> bytes:
        """The file's bytes; the last field is the xxh3-128 of all bytes before it."""
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
            belongs to another step than the folder's name says.
        CheckpointError: it has another format version, or cannot be read.
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
    """The name of a step's folder."""
    return f"step-{step:08d}"


def parse(data: bytes, path: str) -> Manifest:
    """Parse a manifest from bytes, like `read_manifest`."""
    text = data.rpartition(SELF.encode())[0]
    if data != text + _end(text):
        raise CorruptCheckpoint(f"{path}: does not match its own checksum: the file is damaged")
    with reading_record(path):
        entries = json.loads(data)
        if entries["format"] != FORMAT:
            raise CorruptCheckpoint(f"{path}: its format is {entries['format']!r}, not {FORMAT!r}")
        if entries["version"] != VERSION:
            raise CheckpointError(
                f"{path}: has format version {entries['version']!r}, this anyrank reads {VERSION}: "
                "resume with the anyrank that wrote it, or a newer one"
            )
        return _manifest(entries)


def _manifest(entries: dict[str, Any]) -> Manifest:
    """Build the manifest from the entries of the JSON object that a save wrote.

    Raises for a value of another kind, or a file name that would lead out of the folder.
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
    if not re.fullmatch("[0-9a-f]{1,64}", entries["run"]):  # it becomes part of folder names
        raise ValueError(f"run: {entries['run'][:40]!r} is not an id of a run")
    files = {name: FileRecord(**record) for name, record in entries["files"].items()}
    for name in files:
        if name == ".." or "/" in name or "\\" in name:
            raise ValueError(f"files: {name[:40]!r} lies outside of the step's folder")
    values["files"] = files
    values["ranks"] = [
        RankFiles(_size(size), FileRecord(_size(index_size), str(checksum)))
        for size, index_size, checksum in entries["ranks"]
    ]
    if not values["ranks"]:
        raise ValueError("ranks: are none")
    if len(values["ranks"]) != values["saved_on"]["ranks"]:
        raise ValueError(f"ranks: are {len(values['ranks'])}, and saved_on says otherwise")
    return Manifest(**values)


def _size(number: Any) -> int:
    """A number of bytes; ValueError for anything else."""
    if type(number) is not int or number < 0:
        raise ValueError(f"ranks: {number!r:.40} is not a number of bytes")
    return number


def _value(name: str, value: Any) -> str:
    """A field as JSON: in lines for people, but for lists with an entry for each rank."""
    if name in ("ranks", "generators"):
        return json.dumps(value, separators=(",", ":"))
    return json.dumps(value, indent=1).replace("\n", "\n ")


def data_name(rank: int) -> str:
    """Name a rank's data file as DCP does, because DCP's readers expect that name."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """The file that says what lies where in a rank's data file."""
    return f"__{rank}_0.json"


def read_small(
    storage: Storage, folder: str, name: str, expected: FileRecord | None = None
) -> bytes:
    """Read a small file of a step, whole, and compare it with its record if there is one.

    Raises:
        CorruptCheckpoint: the file is missing, or its bytes are not those that were written.
        CheckpointError: it cannot be read; chained to the storage's error.
    """
    path = join_path(folder, name)
    try:
        data = read_whole(storage, path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptCheckpoint(f"{path}: is missing, or no file: the step is damaged") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except LoadError as error:  # it already names the path and the byte
        raise CheckpointError(str(error)) from error
    if expected is not None:
        actual = digest_of(data)
        if (actual.size, actual.xxh3_64) != (expected.size, expected.xxh3_64):
            raise CorruptCheckpoint(
                f"{path}: {actual.size} bytes with checksum {actual.xxh3_64}, the manifest says "
                f"{expected.size} with {expected.xxh3_64}: the file is damaged"
            )
    return data


def _end(text: bytes) -> bytes:
    """The end of a manifest, after its text: the digest and the closing brace."""
    import xxhash  # only runs need it

    return f'{SELF}"{xxhash.xxh3_128_hexdigest(text)}"\n}}\n'.encode()
