"""Chooses the weights of a source that holds several tables of tensors.

A table is everything that a checkpoint stores under one name: `model`, `ema`, `optimizer`. The
rules are those of `weights_for`. If an entry of `rename=` matches nothing, and a table would be
taken only for its name, the error lists the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.listing import Listing
from anyrank.sources.part_names import NESTED
from anyrank.sources.tables.renaming import Renamer
from anyrank.sources.tables.table_names import TableNames, outer_name, whole_keys, whole_unread
from anyrank.tensors.names import Rename, candidates
from anyrank.tensors.near_names import Near
from anyrank.tensors.spec import StoredTensor


def weights_for(known: Collection[str], listing: Listing, rename: Renamer | None) -> Listing:
    """Return the weights of a source, which may also hold an optimizer, averages or other parts.

    The first rule that applies decides what is taken:

    1. Everything, if there is no `rename` and every key is a name of the model.
    2. The tables that `rename` selects.
    3. The tables that have the names of parts of the model, if there is no `rename`.
    4. The first table of `NESTED` that has names of the model.
    5. Everything, except optimizers and similar parts.

    Args:
        known: names of the tensors to fill.
        listing: the source.
        rename: the caller's renaming, from keys of the source, or of its table of weights, to these
            names.
    """
    # Tables next to tensors at the root are modules, if the model has their names.
    root_has_modules = not listing.table and _any_known(listing.beside, known)
    is_whole = bool(listing.tensors or not listing.beside) and not root_has_modules
    if rename is None and is_whole and all(key in known for key in listing.tensors):
        return replace(listing, table="")
    names = TableNames(listing)

    def fits(key: str, name: str) -> bool:
        return name != key and any(other in known for other in candidates(name))

    def is_cut(key: str, name: str) -> bool:
        return key.endswith(f".{name}") and names.leaves(key, name)

    if rename is not None:
        rename = partial(_renamed, rename)
        # `is_cut`: `rename=` selects a table, but strips too short a prefix. Another table would be
        # a different model.
        named = _tables_named(names, rename, fits) or _tables_named(names, rename, is_cut)
        if named is not None:
            return named
    elif root_has_modules or (listing.beside and not _any_known(listing.tensors, known)):
        parts = _tables_named(names, str, lambda key, _: _any_known([key], known))
        if parts is not None:
            return parts
    prefix = inner_prefix(listing.tensors, known, rename)
    inner: dict[str, StoredTensor] = {}
    others: list[str] = []
    for key, stored in listing.tensors.items():
        if prefix and key.startswith(prefix):
            inner[key[len(prefix) :]] = stored
        elif _is_in_other_part(key, known, names, prefix or ""):
            others.append(key)
        else:
            inner.setdefault(key, stored)
    return _chosen(names, inner, others)


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
    # Keys that are not used need not be renamed, and an entry for them is not reported.
    others = [*chosen.beside, *chosen.skipped, *source.extras, *source.skipped]
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


def _before(key: str, names: Collection[str]) -> str:
    """Return the text before the longest end of a key that is a name; "" if no end is a name."""
    parts = key.split(".")
    cuts = range(1, len(parts))
    return next((".".join(parts[:n]) for n in cuts if ".".join(parts[n:]) in names), "")


def _alternatives(source: Listing, chosen: Listing) -> list[str]:
    """Return the tables that hold most of the chosen names, if the choice was a guess."""
    whole = whole_keys(source)
    if whole.keys() >= chosen.tensors.keys():  # chosen by whole keys, which is not a guess
        return []
    names = TableNames(source)
    keys = (key for key in whole if not names.other_part_of(key))
    counts = Counter(filter(None, (_before(key, chosen.tensors) for key in keys)))
    tables = [table for table, count in counts.items() if 2 * count >= len(chosen.tensors)]
    return sorted(tables) if len(tables) > 1 else []


def tables_named(listing: Listing, rename: Renamer | None) -> Listing | None:
    """Return the tables from which `rename=` takes tensors, by whole keys; None if it names no
    table.

    The tensors to fill are not known.
    """
    if rename is None:
        return None
    names = TableNames(listing)
    return _tables_named(names, partial(_renamed, rename), names.leaves)


def _tables_named(
    names: TableNames, rename: Renamer, is_named: Callable[[str, str], bool]
) -> Listing | None:
    """Return the tables that contain a key for which `is_named(key, rename(key))`; None without
    such a key.
    """
    listing, whole = names.listing, names.tensors
    known_tables = bool(listing.table or listing.tables or listing.beside)
    parts = {key: part for key in whole if known_tables and (part := names.other_part_of(key))}
    # Try optimizers and callbacks last: a regex for weights may match them too. {"optimizer": ""}
    # drops the part, so it selects nothing.
    deeper = [key for key, part in parts.items() if rename(key) != key.removeprefix(f"{part}.")]
    named: set[str] = set()
    for keys in (whole.keys() - parts.keys(), deeper):
        named = named or {names.table_of(key) for key in keys if is_named(key, rename(key))}
    if not named or (not known_tables and named == {""}):
        return listing if named else None
    chosen = {key: t for key, t in whole.items() if names.table_of(key) in named}
    return take_tables(listing, chosen, [key for key in whole if key not in chosen])


def take_tables(
    listing: Listing, chosen: dict[str, StoredTensor], others: Iterable[str]
) -> Listing:
    """Return the listing with only the tensors of some tables, by whole keys; skip the rest."""
    names = TableNames(listing)
    tables = {names.table_of(key) for key in chosen}
    read = {*tables, *chosen}
    skipped = {key: why for key, why in listing.skipped.items() if key not in read}
    unread = whole_unread(listing).items()
    unreadable = {key: what for key, what in unread if names.table_of(key) in tables}
    # Tensors of other tables stay visible, because scales may be in a separate table.
    left = {key: t.renamed(key) for key, t in names.tensors.items() if key not in chosen}
    chosen_listing = _chosen(names, chosen, others, skipped)
    return replace(chosen_listing, unreadable=unreadable, beside=left)


def inner_prefix(
    keys: Iterable[str], known: Collection[str], rename: Callable[[str], str] | None = None
) -> str | None:
    """Return the prefix of the weights, if no key itself is the name of a tensor of the model.

    If one name is above all (`app` in torch's recipes for DCP), tables below it are tried too. The
    text after the prefix may be the name, or become it through `rename`.
    """
    keys = list(keys)
    renamers = [lambda key: key, *([rename] if rename else [])]

    def any_known(prefix: str) -> bool:
        inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        return _any_known((renamed(key) for renamed in renamers for key in inner), known)

    if any_known(""):
        return None
    firsts, outer = {key.partition(".")[0] for key in keys}, outer_name(keys)
    prefixes = [f"{name}." for name in NESTED if name in firsts]
    prefixes += [f"{outer}.{name}." for name in NESTED if outer]
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


def _renamed(rename: Renamer, key: str) -> str:
    """Return the renamed key; the key itself if a function fails, which is for other tables."""
    try:
        return rename(key)
    except AnyrankError:
        return key


def _is_in(key: str, tables: Collection[str]) -> bool:
    """Return whether a key is one of these names, or is below one of them."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in tables for n in range(1, len(parts) + 1))


def _is_in_other_part(key: str, known: Collection[str], names: TableNames, prefix: str) -> bool:
    """Return whether a key, within the listing's table, is in a different part of the checkpoint
    than the weights, which start with `prefix`; and is not only unknown.
    """
    tables: Collection[str] = () if names.listing.table else names.listing.tables
    if prefix[:-1] in tables:
        return True
    is_in_table = bool(prefix) or key.partition(".")[0] in tables
    return is_in_table and key not in known and bool(names.other_part_of(key))


def _chosen(
    names: TableNames,
    tensors: dict[str, StoredTensor],
    others: Iterable[str],
    skipped: Mapping[str, str] | None = None,
) -> Listing:
    """Return the listing with only these tensors.

    Args:
        names: the names of the listing's tables.
        tensors: the tensors to take.
        others: keys that are listed as skipped.
        skipped: what is skipped already. Default: that of the listing.
    """
    listing = names.listing
    skipped = listing.skipped if skipped is None else skipped
    notes = {
        key: "not weights" if names.other_part_of(key) else "of another table"
        for key in others
        if not _is_in(key, skipped)
    }
    return replace(
        listing,
        tensors=tensors,
        skipped={**skipped, **notes},
        table="",
        beside={key: t for key, t in listing.beside.items() if key not in tensors},
        unread_beside={},
    )
