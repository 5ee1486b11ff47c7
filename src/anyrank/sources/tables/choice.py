"""Chooses the weights of a source that holds several tables of tensors.

A table is everything that a checkpoint stores under one name: `model`, `ema`, `optimizer`. Tables
out of which the caller's `rename=` takes names are preferred; then the tables whose keys are names
of the model; then the first of the known tables (`NESTED` of `part_names.py`). If an entry of
`rename=` matches nothing, and a known table would be taken instead, the error lists the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.listing import Listing
from anyrank.sources.part_names import NESTED, is_other_part
from anyrank.tensors.names import Rename, candidates
from anyrank.tensors.near_names import Near
from anyrank.tensors.spec import StoredTensor

Renamer = Callable[[str], str]
T = TypeVar("T")


def weights_for(known: Collection[str], listing: Listing, rename: Renamer | None) -> Listing:
    """Return the weights of a source, which may also hold an optimizer, averages or other parts.

    Args:
        known: names of the tensors to fill.
        listing: the source.
        rename: the caller's renaming, from keys of the source, or of its table of weights, to these
            names.
    """
    # Tables next to tensors at the root are modules, if the model has their names.
    is_beside = not listing.table and _any_known(listing.beside, known)
    # If all keys of a source are names of the model, there is nothing to choose.
    is_all = bool(listing.tensors or not listing.beside) and not is_beside
    if rename is None and is_all and all(key in known for key in listing.tensors):
        return replace(listing, table="")

    def fits(key: str, name: str) -> bool:
        return name != key and any(other in known for other in candidates(name))

    depth = _depth_of_tables(listing)

    def is_cut(key: str, name: str) -> bool:
        return key.endswith(f".{name}") and _leaves_table(key, name, listing, depth)

    if rename is not None:
        rename = partial(_renamed, rename)
        # The table was chosen, but with a prefix that is too short; a different table would be a
        # different model.
        named = _tables_named(listing, rename, fits) or _tables_named(listing, rename, is_cut)
        if named is not None:
            return named
    elif is_beside or (listing.beside and not _any_known(listing.tensors, known)):
        # A model that contains several parts under their names.
        parts = _tables_named(listing, str, lambda key, _: _any_known([key], known))
        if parts is not None:
            return parts
    prefix = inner_prefix(listing.tensors, known, rename)
    inner: dict[str, StoredTensor] = {}
    others: list[str] = []
    for key, stored in listing.tensors.items():
        if prefix and key.startswith(prefix):
            inner[key[len(prefix) :]] = stored
        elif _is_beside(key, known, listing, prefix or ""):
            others.append(key)
        else:
            inner.setdefault(key, stored)
    return _chosen(listing, inner, others)


def unused_renames(
    rename: Rename,
    source: Listing,
    chosen: Listing,
    keys: Collection[str],
    tables: Sequence[str] = (),
) -> list[str]:
    """Return a note for each entry of `rename=` that matches no key of a source.

    Args:
        rename: the caller's `rename=`.
        source: everything in the source.
        chosen: the result of `weights_for`.
        keys: the keys that were renamed.
        tables: the tables that hold weights, if all of them were taken because no model decides.

    Raises:
        LoadError: an entry of a dict or all entries of a list match nothing, although the table was
            chosen only by its name, or all tables were taken.
    """
    if rename is None:
        return []
    used = {id(stored) for stored in chosen.tensors.values()}
    left = [key for key, stored in whole_keys(source).items() if id(stored) not in used]
    # Keys that are not used need not be renamed, and an entry for them is not reported.
    others = [*left, *source.extras, *source.skipped]
    idle = unused(rename, {*chosen.tensors, *keys, *others})
    if not idle:
        return []
    # A list of regexes may be meant for files of several kinds. If none matches this file, they are
    # probably mistyped, as is an entry of a dict that matches nothing.
    is_for_source = isinstance(rename, Sequence) and len(idle) < len(rename)
    if len(tables) < 2:
        tables = _alternatives(source, chosen)
    tables = [] if is_for_source else tables
    near = Near({*chosen.tensors, *others, *tables})
    if tables:
        raise LoadError(
            f"rename= refers to {idle[0]!r}{near.hint(idle[0])}, but no key of the source matches. "
            f"The source has the tables {', '.join(tables)}; name one of them."
        )
    return [f"{old}: this entry of rename= matches no key{near.hint(old)}" for old in idle]


def _before(key: str, names: Collection[str]) -> str | None:
    """Return the text before the longest end of a key that is a name; None if no end is a name."""
    parts = key.split(".")
    cuts = range(1, len(parts))
    return next((".".join(parts[:n]) for n in cuts if ".".join(parts[n:]) in names), None)


def _alternatives(source: Listing, chosen: Listing) -> list[str]:
    """Return the tables that hold most of the chosen names, if the choice was a guess."""
    whole = whole_keys(source)
    if whole.keys() >= chosen.tensors.keys():  # chosen by whole keys, which is not a guess
        return []
    names = {id(stored): key for key, stored in chosen.tensors.items()}
    counts: Counter[str] = Counter()
    for key, stored in whole.items():
        if _is_other_part(key, source):
            continue
        end = names.get(id(stored))
        table = _before(key, chosen.tensors) if end is None else key.removesuffix(end).rstrip(".")
        if table is not None:
            counts[table] += 1
    tables = [name for name, count in counts.items() if name and 2 * count >= len(names)]
    return sorted(tables) if len(tables) > 1 else []


def tables_named(listing: Listing, rename: Renamer | None) -> Listing | None:
    """Return the tables from which `rename=` takes tensors, by whole keys; None if it names no
    table.

    The tensors to fill are not known.
    """
    if rename is None:
        return None
    leaves = partial(_leaves_table, listing=listing, depth=_depth_of_tables(listing))
    return _tables_named(listing, partial(_renamed, rename), leaves)


def _depth_of_tables(listing: Listing) -> int:
    """Return which part of a whole key names the table: the second, if one name is above all."""
    return int(len({key.partition(".")[0] for key in whole_keys(listing)}) == 1)


def _leaves_table(key: str, name: str, listing: Listing, depth: int) -> bool:
    """Return whether the new name of a whole key is outside the key's table.

    A regex for names within tables does not do that.
    """
    parts = _table_of(key, listing).split(".")
    table = parts[min(depth, len(parts) - 1)]
    return name not in ("", key) and name.split(".").count(table) < key.split(".").count(table)


def _tables_named(
    listing: Listing, rename: Renamer, is_named: Callable[[str, str], bool]
) -> Listing | None:
    """Return the tables of which `rename` names a tensor, by whole keys; None if it names none."""
    known_tables = bool(listing.table or listing.tables or listing.beside)
    whole = whole_keys(listing)
    others = {key for key in whole if known_tables and _is_other_part(key, listing)}
    # Parts of an optimizer or a callback are tried last, because a regex for names of weights may
    # match theirs, and only by their whole path, because {"optimizer": ""} drops that part.
    deeper = [key for key in others if not _is_part_cut(key, rename(key))]
    named: set[str] = set()
    for keys in (whole.keys() - others, deeper):
        named = named or {_table_of(key, listing) for key in keys if is_named(key, rename(key))}
    if not named or (not known_tables and named == {""}):
        return listing if named else None
    chosen = {key: t for key, t in whole.items() if _table_of(key, listing) in named}
    return take_tables(listing, chosen, [key for key in whole if key not in chosen])


def _is_part_cut(key: str, name: str) -> bool:
    """Return whether a name is a key of a part such as an optimizer, without the part's name."""
    part = key if is_other_part(key) else key.partition(".")[2]  # below one name above all
    return name == part.partition(".")[2]


def take_tables(
    listing: Listing, chosen: dict[str, StoredTensor], others: Iterable[str]
) -> Listing:
    """Return the listing with only the tensors of some tables, by whole keys; skip the rest."""
    tables = {_table_of(key, listing) for key in chosen}
    read = {*tables, *chosen}
    skipped = {key: why for key, why in listing.skipped.items() if key not in read}
    unread = whole_unread(listing).items()
    unreadable = {key: what for key, what in unread if _table_of(key, listing) in tables}
    # Tensors of other tables stay visible, because scales may be in a separate table.
    left = {key: t.renamed(key) for key, t in whole_keys(listing).items() if key not in chosen}
    listing = replace(listing, skipped=skipped, unreadable=unreadable, beside=left)
    return _chosen(listing, chosen, others)


def inner_prefix(
    keys: Iterable[str], known: Collection[str], rename: Callable[[str], str] | None = None
) -> str | None:
    """Return the prefix of the weights, if no key itself is the name of a tensor of the model.

    If one name is above all (`app` in torch's recipes for DCP), the search starts below it. The
    text after the prefix may be the name, or become it through `rename`.
    """
    keys = list(keys)
    renamers = [lambda key: key, *([rename] if rename else [])]

    def any_known(prefix: str) -> bool:
        inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        return _any_known((renamed(key) for renamed in renamers for key in inner), known)

    if any_known(""):
        return None
    outer = {f"{key.partition('.')[0]}." for key in keys}
    [above] = outer if len(outer) == 1 else [""]
    prefixes = [f"{name}." for name in NESTED if f"{name}." in outer]
    prefixes += [f"{above}{name}." for name in NESTED if above]
    return next((prefix for prefix in prefixes if any_known(prefix)), None)


def _any_known(keys: Iterable[str], known: Collection[str]) -> bool:
    return any(name in known for key in keys for name in candidates(key))


def unused(rename: Rename, keys: Collection[str]) -> list[str]:
    """Return the entries of `rename=` that match none of the keys; a callable has no entries."""
    if rename is None or callable(rename):
        return []
    if isinstance(rename, Mapping):
        names = {*keys} | {key[: dot.end()] for key in keys for dot in re.finditer(r"\.", key)}
        return [old for old in rename if old not in names and f"{old}." not in names]
    left: list[str] = []
    for pattern, replacement in rename:  # each gets the result of the previous ones
        regex = re.compile(pattern)
        if not any(map(regex.search, keys)):
            left.append(pattern)
        keys = [regex.sub(replacement, key) for key in keys]
    return left


def whole_keys(listing: Listing) -> dict[str, StoredTensor]:
    """Return every tensor of every table."""
    return _below_table(listing, listing.tensors) | listing.beside


def whole_unread(listing: Listing) -> dict[str, str]:
    """Return every tensor of every table that is not read, with its kind."""
    return _below_table(listing, listing.unreadable) | listing.unread_beside


def _below_table(listing: Listing, table: Mapping[str, T]) -> dict[str, T]:
    prefix = f"{listing.table}." if listing.table else ""
    return {f"{prefix}{key}": value for key, value in table.items()}


def _renamed(rename: Renamer, key: str) -> str:
    """Return the renamed key; the key itself if a function fails, which is for other tables."""
    try:
        return rename(key)
    except AnyrankError:
        return key


def _table_of(key: str, listing: Listing) -> str:
    """Return the table of a whole key; "" for none."""
    if listing.table or key in listing.beside or key in listing.unread_beside:
        return key.partition(".")[0]
    parts = key.split(".")
    tables = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next((table for table in tables if table in listing.tables), "")


def _is_in(key: str, tables: Collection[str]) -> bool:
    """Return whether a key is one of these names, or is below one of them."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in tables for n in range(1, len(parts) + 1))


def _is_other_part(key: str, listing: Listing) -> bool:
    """Return whether a whole key, or the part below the one name above all, is not of weights."""
    outer, _, inner = key.partition(".")
    return is_other_part(key) or (
        outer in listing.tables
        and f"{outer}.{inner.partition('.')[0]}" in listing.tables
        and is_other_part(inner)
    )


def _is_beside(key: str, known: Collection[str], listing: Listing, prefix: str) -> bool:
    """Return whether a key is of a different part of the checkpoint, and not only unknown."""
    tables: Collection[str] = () if listing.table else listing.tables  # keys are within a table
    if prefix[:-1] in tables:
        return True
    table = key.partition(".")[0]
    is_table = bool(prefix) or table in tables
    is_other = is_other_part(key) or is_optimizer(table, listing)
    return is_table and is_other and key not in known


def is_optimizer(table: str, listing: Listing) -> bool:
    """Return whether a table is an optimizer's state_dict(), whatever its name is."""
    groups = f"{table}.param_groups"
    return groups in listing.tables or any(
        key == groups or key.startswith(f"{groups}.") for key in listing.skipped
    )


def _chosen(listing: Listing, tensors: dict[str, StoredTensor], others: Iterable[str]) -> Listing:
    """Return the listing with only these tensors; the rest is listed as skipped."""
    skipped = dict(listing.skipped)
    skipped |= {
        key: "not weights" if _is_other_part(key, listing) else "of another table"
        for key in others
        if not _is_in(key, listing.skipped)
    }
    beside = {key: t for key, t in listing.beside.items() if key not in tensors}
    listing = replace(listing, tensors=tensors, skipped=skipped, table="", beside=beside)
    return replace(listing, unread_beside={})
