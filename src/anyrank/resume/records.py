"""What the manifest and the index say of each other, before any part looks at them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

from anyrank.errors import CorruptCheckpoint
from anyrank.files.manifest import Manifest
from anyrank.random_state.saved_streams import check_saved, from_json

WHOLE = ("~whole", "~like", "~laid")  # marks of a tensor in a record
OWN = "~rank"  # the mark of a tensor that a rank alone held, named `<name>@<rank>`
KINDS = ("module", "optimizer", "stateful")


def check_records(manifest: Manifest, names: Collection[str], path: str) -> None:
    """Compare the record of every part with the index's tensors, and the streams with the ranks.

    Raises:
        CorruptCheckpoint: names the first part that is wrong, or the first tensor that is in only
            one of them.
    """
    try:
        _check_streams(manifest)
        for part, record in manifest.parts.items():
            _check_part(f"parts.{part}", record, manifest.saved_on["ranks"])
        _check_tensors(manifest, names)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path}: {error}: the step is damaged") from error


def _check_streams(manifest: Manifest) -> None:
    """Raises ValueError for streams that a save cannot have written."""
    streams = from_json(manifest.streams)
    check_saved(streams)
    count, ranks = len(streams.coords), manifest.saved_on["ranks"]
    if count != ranks:
        raise ValueError(f"streams: of {count} ranks, not {ranks}")


def _check_part(where: str, record: Any, ranks: int) -> None:
    """Raises ValueError for a record that is not that of a part of its kind."""
    if record["kind"] not in KINDS:
        raise ValueError(f"{where}.kind: {record['kind']!r:.40} is none")
    trees = record.get("by_rank")
    if trees is not None and len(trees) != ranks:
        raise ValueError(f"{where}.by_rank: has {len(trees)} trees")


def _check_tensors(manifest: Manifest, names: Collection[str]) -> None:
    """Raises ValueError for a tensor that is in the manifest or in the index alone.

    A module's own tensors are in the index alone: the module says which they must be.
    """
    whole, own = set[str](), set[str]()
    for mark, name in _references(manifest.parts):
        (own if mark == OWN else whole).add(name)
    owners = {name.rpartition("@")[0] for name in names}
    lost = sorted((whole - set(names)) | (own - owners))
    if lost:
        raise ValueError(f"has no tensor {lost[0]}")
    modules = tuple(f"{k}." for k, record in manifest.parts.items() if record["kind"] == "module")
    for name in names:
        known = name in whole or name.rpartition("@")[0] in own or name.startswith(modules)
        if not known:
            raise ValueError(f"the manifest does not refer to {name}, which was saved")


def _references(value: Any) -> Iterator[tuple[str, str]]:
    """Mark and name of every tensor that a record refers to."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        for key, item in table.items():
            if key in WHOLE or key == OWN:
                name = cast("list[Any]", item)[0] if isinstance(item, list) and item else item
                if isinstance(name, str):
                    yield key, name
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _references(item)


def check_counts(manifest: Manifest, path: str) -> None:
    """Compare the manifest's epoch and samples with those of the loader that counted them.

    Raises:
        CorruptCheckpoint: they differ.
    """
    tree = manifest.parts["data"].get("tree")
    for name, here in (("epoch", manifest.epoch), ("samples", manifest.samples)):
        if isinstance(tree, dict) and tree.get(name) != here:
            raise CorruptCheckpoint(
                f"{path}: {name} is {here} in the manifest, and {tree.get(name)} in its data: it "
                "is damaged"
            )
