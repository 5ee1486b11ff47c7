"""Several files as one source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.listing import Checksum, FileInfo, Listing, Locator
from anyrank.tensors.spec import StoredTensor


def join(
    format_name: str, listings: Iterable[Listing], skipped: Mapping[str, str] | None = None
) -> Listing:
    """Join the listings of several files into one. What it says of its format holds for all.

    Raises:
        LoadError: two of them hold the same key.
    """
    parts = [*listings]
    files: list[FileInfo] = []
    tensors: dict[str, StoredTensor] = {}
    checksums: list[Checksum] = []
    sums: dict[int, str] = {}
    adapters: dict[int, dict[str, Any]] = {}
    locators: dict[int, Locator] = {}
    beside: dict[str, StoredTensor] = {}
    for listing in parts:
        base = len(files)
        files += (info.with_file_offset(base) for info in listing.files)
        checksums += (replace(c, file=c.file + base) for c in listing.checksums)
        sums |= {base + number: where for number, where in listing.sums.items()}
        adapters |= {base + number: config for number, config in listing.adapters.items()}
        locators |= {base + number: locator for number, locator in listing.locators.items()}
        for key, stored in listing.tensors.items():
            if key in tensors:
                first = files[tensors[key].chunks[0].file].path if tensors[key].chunks else "?"
                raise LoadError(
                    f"{key} is both in {first} and in {listing.files[0].path}. Pass only files "
                    "that belong together."
                )
            tensors[key] = stored.with_file_offset(base)
        beside |= {key: t.with_file_offset(base) for key, t in listing.beside.items()}
    return Listing(
        format=format_name,
        files=tuple(files),
        tensors=tensors,
        metadata={k: v for listing in parts for k, v in listing.metadata.items()},
        skipped=dict(skipped or {}) | {k: v for part in parts for k, v in part.skipped.items()},
        checksums=tuple(checksums),
        sums=sums,
        extras={k: v for listing in parts for k, v in listing.extras.items()},
        unreadable={k: v for listing in parts for k, v in listing.unreadable.items()},
        tables=frozenset(table for listing in parts for table in listing.tables),
        table=next((listing.table for listing in parts if listing.table), ""),
        beside=beside,
        unread_beside={k: v for listing in parts for k, v in listing.unread_beside.items()},
        quantization=next((part.quantization for part in parts if part.quantization), {}),
        adapters=adapters,
        locators=locators,
        is_run=all(part.is_run for part in parts),
        is_file_named=all(part.is_file_named for part in parts),
        states_table=all(part.states_table for part in parts),
        has_companions=all(part.has_companions for part in parts),
    )
