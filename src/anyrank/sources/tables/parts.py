"""The weights and the other tables of a source, without a model.

`convert` writes the weights, and `diff` compares both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anyrank.files.listing import Listing
from anyrank.sources.part_names import NESTED
from anyrank.sources.tables.table_names import TableNames, whole_unread
from anyrank.tensors.names import plain_names
from anyrank.tensors.spec import StoredTensor


@dataclass(frozen=True)
class Parts:
    """The contents of a source, by whole keys.

    Attributes:
        weights: the tensors of all tables that may hold weights.
        others: tensors of optimizers and other parts, which flat sources do not have.
        unread: tensors among them whose bytes are not their values.
        prefix: prefix of the weights' keys, if they form one table with a known name.
        tables: the whole names of the tables that may hold weights; "" for tensors outside tables.
    """

    weights: dict[str, StoredTensor]
    others: dict[str, StoredTensor]
    unread: dict[str, str]
    prefix: str = ""
    tables: tuple[str, ...] = ()

    @property
    def has_several(self) -> bool:
        """True if several tables may hold weights."""
        return len(self.tables) > 1


def parts_of(listing: Listing) -> Parts:
    """Sort tensors into weights and others: by table, if the format tells tables from modules.

    A flat source has no tables, whatever the names of a model's children are. Single tensors next
    to a known table with more tensors (a queue, a generator's state) are not weights.
    """
    unread = whole_unread(listing)
    if listing.states_table:
        prefix = f"{listing.table}." if listing.table else ""
        weights = {prefix + key: stored for key, stored in listing.tensors.items()}
        return Parts(weights, dict(listing.beside), unread, prefix)
    names = TableNames(listing)
    groups: dict[str, dict[str, StoredTensor]] = {}  # by part
    others: dict[str, StoredTensor] = {}
    for key, stored in names.tensors.items():
        part = names.part_of(key)
        is_other = key in listing.beside if part == "" else names.other_part_of(key) != ""
        if is_other:
            others[key] = stored
        else:
            groups.setdefault(part, {})[key] = stored
    known = {part for part in groups if part.rpartition(".")[2] in NESTED}
    if len(groups.get("", ())) < max((len(groups[part]) for part in known), default=0):
        others |= groups.pop("", {})
    weights = {key: stored for group in groups.values() for key, stored in group.items()}
    [only] = groups if len(groups) == 1 else [""]
    prefix = f"{only}." if only in known else ""
    return Parts(weights, others, unread, prefix, tuple(groups))


def comparable_views(a: Listing, b: Listing) -> tuple[Listing, Listing, list[str]]:
    """Make two sources comparable; also return keys outside the weights that only one of them has.

    Weights are compared by their names in the table of weights, if both sources have at most one.
    Other tensors are compared only if both are checkpoints of the same format, because each format
    has its own names. Names lose what torch's wrappers add if the sources have no name in common.
    """
    of_a, of_b = parts_of(a), parts_of(b)
    both = bool(of_a.others and of_b.others) and a.format.split()[0] == b.format.split()[0]
    # Names of several tables stay whole, and so do names that a different part has too.
    is_whole = of_a.has_several or of_b.has_several
    is_whole |= both and any(
        not part.others.keys().isdisjoint(key.removeprefix(part.prefix) for key in part.weights)
        for part in (of_a, of_b)
    )

    def shown(listing: Listing, part: Parts) -> Listing:
        prefix = "" if is_whole else part.prefix
        tensors = {key.removeprefix(prefix): stored for key, stored in part.weights.items()}
        unread = {key.removeprefix(prefix): what for key, what in part.unread.items()}
        listing = replace(listing, unreadable=unread)
        return listing.with_tensors(tensors | (part.others if both else {}))

    beside = [] if both else [*of_a.others, *of_b.others]
    in_a, in_b = shown(a, of_a), shown(b, of_b)
    plain_a, plain_b = _unwrapped(in_a), _unwrapped(in_b)
    if _have_common(in_a, in_b) or not _have_common(plain_a, plain_b):
        return in_a, in_b, beside
    return plain_a, plain_b, beside


def _have_common(a: Listing, b: Listing) -> bool:
    """Return whether two sources have a name in common."""
    return not a.tensors.keys().isdisjoint(b.tensors)


def _unwrapped(listing: Listing) -> Listing:
    """Return a source without what torch's wrappers add to names, unless names become the same."""
    names = plain_names({key: key for key in listing.tensors})
    if len({*names.values()}) < len(names):
        return listing
    return listing.with_tensors({name: listing.tensors[key] for key, name in names.items()})
