"""A model against a listing: which bytes fill which tensor, and every problem with that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import FORMAT
from anyrank.formats.tables import idle_renames, weights_for
from anyrank.model.dialects import LIVE, Case, ModelMatch, dialects_of, dtypes_by_name
from anyrank.model.fits import find_misfit, parametrised, shared_on_meta, unwritable
from anyrank.model.frozen_parts import FrozenSource
from anyrank.model.options import WAYS_OUT, LoadOptions
from anyrank.model.own_code import OwnCode
from anyrank.model.tensors import ModelTensor, find_modules, tensors_of
from anyrank.tensors.names import (
    Near,
    Shapes,
    candidates,
    is_of_adapter,
    is_trained_copy,
    match_keys,
    renamer,
    wrong_prefix,
)
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import first_few, listed

log = logging.getLogger("anyrank.load")

SHOWN = 10
RESIZED = 4  # tensors: an embedding and a head, with their biases
ADAPTERS = (
    "\n  some are of an adapter that the model has not: make it first, with PEFT's "
    "get_peft_model(model, PeftConfig.from_pretrained(folder))"
)
AVERAGED = "n_averaged"  # of torch's AveragedModel: how often, and no weight of the model in it


def match_model(
    model: nn.Module,
    listing: Listing,
    options: LoadOptions,
    tensors: list[ModelTensor] | None = None,
    parts: Mapping[FrozenSource, Listing] | None = None,
) -> ModelMatch:
    """Match a model with a listing, by this rank alone.

    Args:
        model: to be filled.
        listing: what there is. A live one is another model's: nothing is skipped as another part of
            a checkpoint, frozen parts need no source, and no code of the modules is run.
        options: what the caller allows.
        tensors: of the model, if they are known.
        parts: what the sources of its frozen parts hold; not asked for where `listing` is live.

    Raises:
        LoadError: all problems with names, shapes and dtypes, in one list.
    """
    modules = find_modules(model)
    tensors = tensors_of(modules) if tensors is None else tensors
    # No checkpoint has to hold buffers that state_dict leaves out, so no key is asked for them.
    loadable = [i for i, tensor in enumerate(tensors) if tensor.kind != "derived"]
    is_live = listing.format == LIVE
    # A run holds tensors as they were in the model, which no code has changed on the way.
    is_raw = is_live or listing.format == FORMAT
    source = chosen = listing
    # A live source is one model's tensors: none of them is of another table, as an optimizer's.
    if not is_live:
        names = dtypes_by_name(tensors)
        chosen = weights_for(names, source, renamer(options.rename) if options.rename else None)
    case = Case(model, modules, tensors, chosen, options, parts or {})
    dialects, listing, rename = dialects_of(case), chosen, case.rename
    # Numbers become weights before names are compared: a conversion fuses whole weights.
    for dialect in dialects:
        listing = dialect.values(listing)
    # Entries of `rename=` are judged by the source's own keys, which a conversion takes away.
    idle = idle_renames(options.rename, source, chosen, listing.tensors)
    for dialect in dialects:
        listing, rename = dialect.names(listing, rename)
    matched = match_keys([tensors[i].all_names() for i in loadable], listing.tensors, rename)
    stored = {loadable[i]: listing.tensors[key] for i, key in matched.keys.items()}
    match = ModelMatch(tensors, listing, stored, duplicates=matched.duplicates, idle=idle)
    # A frozen part takes what the keys left open from its own source, and compares the rest.
    for dialect in dialects:
        match = dialect.complete(match)
    listing, stored, compared = match.listing, match.stored, match.compared
    empty = {loadable[n] for n in matched.missing}.difference(stored, compared)
    # A live source need not hold a part that is never written to.
    missing = [i for i in sorted(empty) if not (is_live and tensors[i].is_pinned)]
    # AveragedModel counts its steps beside the weights; a key that `rename=` empties is left out.
    ignored = [
        key
        for key in matched.unexpected
        for name in (rename(key),)
        if name in case.derived
        or name in ("", AVERAGED)
        or any(dialect.needs_no_tensor(key, name) for dialect in dialects)
    ]
    own_code = OwnCode([] if is_raw else modules, listing, case.rename)
    of_no_use = {*ignored, *own_code.tensor_keys}
    # A live source holds a tied tensor under each of its names; one of them is enough.
    if is_live:
        of_no_use |= _tied_to(match.wanted, listing)
    unexpected = [key for key in matched.unexpected if key not in of_no_use]
    is_adapter = bool(stored) and all(
        tensors[i].adapter or is_trained_copy(tensors[i].registrations[0].raw) for i in stored
    )
    # A base checkpoint holds no adapters, so they are not missing; on meta they need first values.
    # Nor does an adapter's own file hold the base, which stays as it is.
    needs_no_key = {
        i for i in missing if tensors[i].adapter or (is_adapter and not tensors[i].is_meta)
    }
    absent = [i for i in missing if i not in needs_no_key]
    init = options.missing == "init"
    initialise = [i for i in missing if tensors[i].is_meta or (init and i not in needs_no_key)]
    keep = sorted(set(missing).difference(initialise))
    match = replace(
        match,
        initialise=initialise,
        keep=keep,
        missing=[tensors[i].name for i in absent],
        unexpected=unexpected,
        ignored=ignored,
        own_code=own_code,
    )
    problems = _problems(listing, tensors, match.wanted, absent, unexpected, options)
    problems += _unread(listing, tensors, absent, case.rename)
    problems += parametrised(tensors[i] for i in initialise)
    problems += shared_on_meta(tensors)
    # Adapters are judged last: by then it is known what fills their base.
    for dialect in dialects:
        problems += dialect.problems(match)
    if problems:
        raise LoadError("\n".join([_title(listing), *problems, *_skipped(listing)]))
    return match


def warn_of_idle(match: ModelMatch) -> None:
    """Warn of entries of `rename=` that match no key."""
    if match.idle:
        log.warning("%s", "; ".join(first_few(match.idle, SHOWN)))


def _tied_to(wanted: list[tuple[int, StoredTensor]], listing: Listing) -> set[str]:
    """In a live source: the other names of the tensors that are used."""
    used = {chunk.file for _, stored in wanted for chunk in stored.chunks}
    return {
        key
        for key, stored in listing.tensors.items()
        if used.issuperset(chunk.file for chunk in stored.chunks)
    }


def _title(listing: Listing) -> str:
    where = listing.files[0].path if listing.files else "the source"
    where = "the dict" if listing.format == "memory" else where
    if listing.format == LIVE:
        return "src does not fit dst:"
    return f"{where} ({listing.format}) does not fit the model:"


def _skipped(listing: Listing) -> list[str]:
    skipped = list(listing.skipped)
    return [listed("not looked at in the source", skipped)] if skipped else []


def _unread(
    listing: Listing, targets: list[ModelTensor], absent: list[int], rename: Callable[[str], str]
) -> list[str]:
    """Missing tensors of which the source has something that is not read: first values would stand
    in for weights that are there.
    """
    wanted = {name for index in absent for name in targets[index].flat_names()}
    return [
        f"{key}: is {what}, which is not read, and missing= is for tensors that a source lacks"
        for key, what in listing.unreadable.items()
        if not wanted.isdisjoint(candidates(rename(key)))
    ]


def _problems(
    listing: Listing,
    targets: list[ModelTensor],
    wanted: list[tuple[int, StoredTensor]],
    absent: list[int],
    unexpected: list[str],
    options: LoadOptions,
) -> list[str]:
    """Everything that is wrong with names, shapes and dtypes, in one list."""
    on_meta = [targets[i].name for i in absent if targets[i].is_meta]
    unfilled = [targets[i].name for i in absent]
    shapes = {targets[i].name: targets[i].shape for i in absent}
    # A fresh tensor may be missing, as it keeps its value; one on meta has none.
    unfilled = [name for name in unfilled if not options.is_fresh(name) or name in on_meta]
    lines: list[str] = []
    renaming = _renaming(
        {key: listing.tensors[key].shape for key in unexpected},
        {name: shapes[name] for name in unfilled},
    )
    if options.missing == "error" and unfilled:
        lines.append(
            listed("missing in the source", unfilled, Near(unexpected).hint)
            + (renaming if options.unexpected == "ignore" else "")
            + f"\n  to go on: {options.ways_out['missing']}"
        )
    elif options.missing == "keep" and on_meta:
        lines.append(
            listed("missing in the source, and on meta, so there is nothing to keep", on_meta)
            + "\n  to go on: missing='init'"
        )
    if options.unexpected == "error" and unexpected:
        lines.append(
            listed("unexpected in the source", unexpected, Near(unfilled or _names(targets)).hint)
            + renaming
            + (ADAPTERS if any(is_of_adapter(k) or ".lora_" in k for k in unexpected) else "")
            + f"\n  to go on: {options.ways_out['unexpected']}"
        )
    fits = (unwritable(targets[i]) or find_misfit(targets[i], t, options.cast) for i, t in wanted)
    misfits = [line for line in fits if line]
    lines += misfits[:SHOWN]
    if len(misfits) > SHOWN:
        lines.append(f"... and {len(misfits) - SHOWN} more that do not fit")
    resized = [t.name for i, t in wanted if t.shape != targets[i].shape]
    # More are another model's; a resume has ways of its own.
    if resized and len(resized) <= RESIZED and options.ways_out is WAYS_OUT:
        left_out = dict.fromkeys(resized, "")
        lines.append(
            "  to go on: a model of the source's sizes; or, for a vocabulary or a head of another "
            f"size, rename={left_out!r} with missing='init'"
        )
    return lines


def _names(targets: list[ModelTensor]) -> list[str]:
    return [entry.name for target in targets for entry in target.registrations]


def _renaming(unexpected: Shapes, unfilled: Shapes) -> str:
    """The rename= that places most of the keys, where a prefix is all that is wrong; where several
    do, as of a teacher and a student, all of them.
    """
    changes = wrong_prefix(unexpected, unfilled)
    renames = [
        f"rename={ {old.removesuffix('.'): new.removesuffix('.')} if old else [('^', new)]!r}"
        for old, new, _ in changes
    ]
    return f"\n  {changes[0][2]} of them fit with {', or with '.join(renames)}" if changes else ""
