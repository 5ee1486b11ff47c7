"""Matches a model with a listing: which bytes fill which tensor, and all problems."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from anyrank.errors import LoadError
from anyrank.files.listing import NOT_A_TENSOR, Listing
from anyrank.models.dialects.dialect import (
    Case,
    Dialect,
    ModelMatch,
    dialects_of,
    dtypes_of,
    with_names,
    with_values,
)
from anyrank.models.dialects.registry import DIALECTS
from anyrank.models.dtensors import layout_of
from anyrank.models.first_values.buffers import without_rule
from anyrank.models.first_values.parametrized import parametrized
from anyrank.models.fits import find_misfit, unwritable
from anyrank.models.frozen_parts import FrozenSource
from anyrank.models.misfit_errors import join_problems, mismatch_lines
from anyrank.models.options import LoadOptions
from anyrank.models.overlaps import shared_on_meta, twins_of
from anyrank.models.own_code import OwnCode
from anyrank.models.tensors import ModelTensor, ModelTree
from anyrank.models.wrappers import Registration
from anyrank.sources.tables.choice import unused_renames, weights_for
from anyrank.sources.tables.renaming import Renamer, renamer
from anyrank.tensors.names import (
    AVERAGED,
    TensorKeys,
    candidates,
    is_trained_copy,
    match_keys,
)
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import first_few

log = logging.getLogger("anyrank.load")

SHOWN = 10


def match_model(
    tree: ModelTree,
    listing: Listing,
    options: LoadOptions,
    parts: Mapping[FrozenSource, Listing] | None = None,
) -> ModelMatch:
    """Match a model with a listing. Does not communicate.

    Args:
        tree: the modules and tensors of the model to fill.
        listing: the contents of the source. If it is live (another model), nothing is skipped as a
            different part of a checkpoint, frozen parts need no source, and no code of the modules
            is run.
        options: the caller's options.
        parts: contents of the sources of the model's frozen parts; not needed if `listing` is live.

    Raises:
        LoadError: all problems with names, shapes and dtypes, in one list.
    """
    tensors = tree.tensors
    packed = [t.packed for t in tensors if t.packed is not None]
    tensors = [t for t in tensors if t.packed is None] if packed else tensors
    weights = _weights_among(tensors, listing, options)
    case = Case(tree.modules, tensors, weights, options, parts or {}, DIALECTS)
    dialects = dialects_of(case)
    names = _match_names(case, dialects, listing)
    match = _fill(case, dialects, names)
    _check_packed(packed, names, match, options)
    problems = _problems(case, dialects, match)
    if problems:
        raise LoadError(join_problems(match.listing, problems))
    return match


def _check_packed(
    packed: Sequence[Registration], names: _Names, match: ModelMatch, options: LoadOptions
) -> None:
    """Check that the source does not have to fill frozen quantized parameters.

    They stay as they are if the source is an adapter alone, or with missing="keep".

    Raises:
        LoadError: the source has one, or may not lack one; or one is on meta, without values.
    """
    if not packed:
        return
    stays = options.missing == "keep" or _is_of_adapter_alone(match)
    stored = {names.rename(key) for key in names.listing.tensors}
    for entry in packed:
        parameter = getattr(entry.module, entry.attribute)
        if not stays or parameter.is_meta or not stored.isdisjoint(entry.names):
            layout_of(parameter, entry.name)  # raises


class _Names(NamedTuple):
    """A source with the model's names, and the key of each tensor.

    Attributes:
        listing: the source, with weights in place of the stored forms of libraries.
        rename: maps its keys to the model's names.
        positions: positions of the tensors that need a key.
        matched: the keys of these tensors, by index in `positions`.
        idle: notes about entries of `rename=` that match no key.
    """

    listing: Listing
    rename: Renamer
    positions: Sequence[int]
    matched: TensorKeys
    idle: list[str]


def _weights_among(
    tensors: Sequence[ModelTensor], listing: Listing, options: LoadOptions
) -> Listing:
    """Return the weights of a source; a live source has only the tensors of a model."""
    if listing.is_live:
        return listing
    names = [tensors[i].all_names() for i in _loadable(tensors)]
    known = {name for ends in names for name in chain.from_iterable(ends)}
    return weights_for(known, listing, renamer(options.rename) if options.rename else None)


def _loadable(tensors: Sequence[ModelTensor]) -> list[int]:
    """Return the positions of the tensors in `state_dict()`, which a source must hold."""
    return [i for i, tensor in enumerate(tensors) if tensor.kind != "derived"]


def _match_names(case: Case, dialects: Sequence[Dialect], source: Listing) -> _Names:
    """Find the key of each tensor of a model.

    Args:
        case: the case, with the weights of the source.
        dialects: the dialects that apply.
        source: everything in the source.

    Raises:
        LoadError: as for `unused_renames` and the dialects.
    """
    listing, rename = case.source, case.rename
    # Quantized numbers become weights before names are compared, because a conversion fuses
    # weights. A live source has weights.
    if not case.is_live:
        listing = with_values(listing, case.classes, dtypes_of(case.tensors), rename)
    # Entries of `rename=` are compared with the source's own keys, which a conversion replaces.
    idle = unused_renames(case.options.rename, source, case.source, listing.tensors)
    listing, rename = with_names(listing, rename, dialects)
    positions = _loadable(case.tensors)
    wanted = [case.tensors[i].all_names() for i in positions]
    matched = match_keys(wanted, listing.tensors, rename)
    return _Names(listing, rename, positions, matched, idle)


def _fill(case: Case, dialects: Sequence[Dialect], names: _Names) -> ModelMatch:
    """Determine what fills each tensor, which keys are left over, and which tensors lack bytes.

    Raises:
        LoadError: as for the dialects.
    """
    listing, matched, positions = names.listing, names.matched, names.positions
    stored = {positions[i]: listing.tensors[key] for i, key in matched.keys.items()}
    duplicates = matched.duplicates
    match = ModelMatch(case.tensors, listing, stored, duplicates=duplicates, idle=names.idle)
    match = _with_twins(match, {positions[i]: key for i, key in matched.keys.items()})
    # A frozen part takes tensors without a key from its own source, and compares the others.
    for dialect in dialects:
        match = dialect.complete(match)
    # AveragedModel stores its step count next to the weights; a key that `rename=` empties is
    # dropped.
    ignored = [
        key
        for key in matched.unexpected
        for name in (names.rename(key),)
        if name in case.derived
        or name in ("", AVERAGED)
        or any(dialect.needs_no_tensor(key, name) for dialect in dialects)
    ]
    # A run has the tensors as they were in the model, unchanged by code of its modules.
    is_raw = case.is_live or listing.is_run
    own_code = OwnCode() if is_raw else OwnCode(case.modules, match.listing, case.rename)
    of_no_use = {*ignored, *own_code.tensor_keys}
    # A live source has a tied tensor under each of its names, of which one is enough.
    if case.is_live:
        of_no_use |= _tied_to(match.wanted, match.listing)
    unexpected = [key for key in matched.unexpected if key not in of_no_use]
    match = replace(match, unexpected=unexpected, ignored=ignored, own_code=own_code)
    twins = {twin for twin, first in match.twins.items() if first in match.stored}
    empty = {positions[n] for n in matched.missing}.difference(match.stored, match.compared, twins)
    # A live source need not have a part that is never written to.
    empty = {i for i in empty if not (case.is_live and case.tensors[i].is_pinned)}
    return _without_bytes(match, sorted(empty), case.options)


def _with_twins(match: ModelMatch, keys: Mapping[int, str]) -> ModelMatch:
    """Return the match in which only one of several tensors with the same memory is filled; the
    values that the source has for the others are compared with it.

    Args:
        match: a match whose `tensors`, `listing`, `stored` and `duplicates` are known.
        keys: keys of the tensors that have one.
    """
    twins = twins_of(match.tensors)
    if not twins:
        return match
    stored, tensors, turned = dict(match.stored), dict(match.listing.tensors), set[str]()
    duplicates = dict(match.duplicates)
    for index, (first, is_turned) in twins.items():
        own_stored = stored.get(index)
        if own_stored is None or own_stored.shape != match.tensors[index].shape:
            continue  # the bytes of the first one are enough; a mismatch is reported as such
        del stored[index]
        own_stored = own_stored.transposed() if is_turned else own_stored
        if first not in stored:
            stored[first] = own_stored
            continue
        key = keys[index]
        tensors[key], duplicates[key] = own_stored, keys.get(first, stored[first].name)
        turned |= {key} if is_turned else set()
    return replace(
        match,
        listing=match.listing.with_tensors(tensors),
        stored=stored,
        duplicates=duplicates,
        turned=frozenset(turned),
        twins={index: twin.first for index, twin in twins.items()},
    )


def _problems(case: Case, dialects: Sequence[Dialect], match: ModelMatch) -> list[str]:
    """Return all problems of a match, each with its way out."""
    # Problems with tensors in the source come before missing ones, whose ways out would give up
    # weights. Adapters are checked when it is known what fills their base.
    problems = [line for dialect in dialects for line in dialect.problems(match)]
    problems += _unread(match, case.rename)
    problems += _misfits(match, case.options)
    problems += parametrized(case.tensors[i] for i in match.initialize)
    problems += shared_on_meta(case.tensors)
    # Initialization rules run only if the match has no other problem.
    return problems or without_rule(case.model, match)


def _without_bytes(match: ModelMatch, empty: list[int], options: LoadOptions) -> ModelMatch:
    """Return the match with the outcome of its tensors that are `empty`: without bytes."""
    tensors = match.tensors
    is_adapter = bool(empty) and _is_of_adapter_alone(match)
    # A base checkpoint has no adapters, so they are not absent; on meta they need initial values.
    # The file of an adapter does not have the base, which stays as it is.
    needs_no_key = {
        i for i in empty if tensors[i].adapter or (is_adapter and not tensors[i].is_meta)
    }
    absent = [i for i in empty if i not in needs_no_key]
    init = options.missing == "init"
    initialize = [i for i in empty if tensors[i].is_meta or (init and i not in needs_no_key)]
    keep = sorted(set(empty).difference(initialize))
    return replace(match, initialize=initialize, keep=keep, absent=absent)


def _is_of_adapter_alone(match: ModelMatch) -> bool:
    """Return whether a source is only an adapter, so that the base stays as it is: a folder with
    PEFT's configuration, or keys as PEFT saves them, without the adapter's name. PEFT also saves
    the base's embeddings if they are adapted.
    """
    tensors, stored = match.tensors, match.stored
    added = {
        i for i in stored if tensors[i].adapter or is_trained_copy(tensors[i].registrations[0].raw)
    }
    if not added or len(added) == len(stored):
        return bool(added)
    if all(chunk.file in match.listing.adapters for t in stored.values() for chunk in t.chunks):
        return True
    return all(
        any(stored[i].name in entry.aliases for entry in tensors[i].registrations) for i in added
    )


def warn_about_unused_renames(match: ModelMatch) -> None:
    """Warn about entries of `rename=` that match no key."""
    if match.idle:
        log.warning("%s", "; ".join(first_few(match.idle, SHOWN)))


def _tied_to(wanted: list[tuple[int, StoredTensor]], listing: Listing) -> set[str]:
    """Return the other names, in a live source, of the tensors that are used."""
    used = {chunk.file for _, stored in wanted for chunk in stored.chunks}
    return {
        key
        for key, stored in listing.tensors.items()
        if used.issuperset(chunk.file for chunk in stored.chunks)
    }


def _unread(match: ModelMatch, rename: Renamer) -> list[str]:
    """Report absent tensors for which the source has a value that is not read.

    Otherwise initial values would replace weights that exist.
    """
    listing = match.listing
    names = {name for index in match.absent for name in match.tensors[index].flat_names()}
    # A list or dict may hold an absent tensor below its name.
    wanted = {name[:end] for name in names for end in (*_dots(name), len(name))}
    not_tensors = {key: what for key, what in listing.skipped.items() if what == NOT_A_TENSOR}
    unread = not_tensors | listing.unreadable
    return [
        f"{key}: is {what.rstrip('.')}. anyrank does not read it, and missing= does not apply to "
        f"it. Store it as a tensor, or drop it with rename={ {key: ''}!r}"
        for key, what in unread.items()
        if not wanted.isdisjoint(candidates(rename(key)))
    ]


def _dots(name: str) -> list[int]:
    return [position for position, letter in enumerate(name) if letter == "."]


def _misfits(match: ModelMatch, options: LoadOptions) -> list[str]:
    """Return all problems with names, shapes and dtypes, with the ways out."""
    tensors = match.tensors
    # A fresh tensor may be absent, because it keeps its value; but a meta tensor has no value.
    absent = [tensors[i] for i in match.absent]
    unfilled = [t for t in absent if t.is_meta or not options.is_fresh(t.name)]
    lacks_any = {
        "error": bool(unfilled),
        "keep": any(tensor.is_meta for tensor in unfilled),
        "init": False,
    }[options.missing]
    fits = (
        unwritable(tensors[i]) or find_misfit(tensors[i], t, options.cast) for i, t in match.wanted
    )
    misfits = [line for line in fits if line]
    if not (lacks_any or misfits or (match.unexpected and options.unexpected == "error")):
        return []
    return mismatch_lines(match, unfilled, misfits, options)
