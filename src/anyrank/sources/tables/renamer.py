"""Which tensors of a source are the weights: all of them, or those of one of its tables; and
`rename=`, which says so, and what their keys mean."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from anyrank.files.listing import Listing
from anyrank.tensors.names import Rename


def renamer(rename: Rename) -> Callable[[str], str]:
    """One function for the three forms of `rename=`: a dict of keys or prefixes, pairs of regex and
    replacement applied in order, or a callable.

    Raises:
        ValueError: a regex that does not compile, or an entry that is not a pair.
        TypeError: another type.
    """
    if rename is None:
        return lambda key: key
    from anyrank.sources.tables.renaming import function_of  # a door: see test_house

    return function_of(rename)


def weights_for(
    known: Collection[str], listing: Listing, rename: Callable[[str], str] | None
) -> Listing:
    """The weights of a source that may hold an optimizer, averages or other parts as well.

    Args:
        known: names of the tensors that are to be filled.
        listing: the source.
        rename: of the caller, from keys of the source, or of its table of weights, to these names.
    """
    # A source whose keys are all names of the model leaves nothing to choose.
    is_all = bool(listing.tensors or not listing.beside)
    if rename is None and is_all and all(key in known for key in listing.tensors):
        return replace(listing, table="")
    from anyrank.sources.tables.choice import chosen_weights  # a door: see test_house

    return chosen_weights(known, listing, rename)


def idle_renames(
    rename: Rename, source: Listing, chosen: Listing, keys: Collection[str]
) -> list[str]:
    """Entries of `rename=` that match no key of a source, in words.

    Args:
        rename: of the caller.
        source: all that there is.
        chosen: what `weights_for` made of it.
        keys: that were renamed.

    Raises:
        LoadError: such an entry of a dict, or a list of which all are such, where a guess has
            chosen one of several tables.
    """
    if rename is None:
        return []
    from anyrank.sources.tables.choice import idle_entries  # a door

    return idle_entries(rename, source, chosen, keys)
