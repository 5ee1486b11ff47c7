"""What the manifest holds of each part, checked before any part looks at it."""

from __future__ import annotations

from anyrank.errors import CorruptCheckpoint
from anyrank.files.manifest import Manifest
from anyrank.files.schema import ANY, Optional, Table, check
from anyrank.random_state.saved_streams import from_json

BY_METHODS = {
    "kind": str,
    "class": str,
    "layout": str,
    "tree": ANY,
    "by_rank": Optional([ANY]),
    "opaque": Optional(bool),
}
RECORDS = {
    "module": {
        "kind": str,
        "layout": str,
        "frozen": Table({"source": (str, [str]), "digest": str}),
        "extra": Table(ANY),
    },
    "optimizer": {
        "kind": str,
        "class": str,
        "layout": str,
        "groups": [{"params": [str], "options": Table(ANY)}],
        "state": Table(ANY),
        "extra": ANY,
    },
    "stateful": BY_METHODS,
}


def check_records(manifest: Manifest, path: str) -> None:
    """Compare the record of every part with what its kind must have.

    Raises:
        CorruptCheckpoint: names the first field that is wrong.
    """
    try:
        count = len(from_json(manifest.streams).coords)
        if count != manifest.saved_on["ranks"]:
            raise ValueError(f"streams: of {count} ranks, not {manifest.saved_on['ranks']}")
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: {error}: the manifest is damaged") from error
    for part, record in manifest.parts.items():
        where = f"parts.{part}"
        try:
            check(record, {"kind": str}, where)
            if record["kind"] not in RECORDS:
                raise ValueError(f"{where}.kind: {record['kind'][:40]!r} is none")
            check(record, BY_METHODS if "opaque" in record else RECORDS[record["kind"]], where)
            trees = record.get("by_rank")
            if trees is not None and len(trees) != manifest.saved_on["ranks"]:
                raise ValueError(f"{where}.by_rank: has {len(trees)} trees")
        except ValueError as error:
            raise CorruptCheckpoint(f"{path}: {error}: the manifest is damaged") from error
