"""A model against a listing: which bytes fill which tensor, and every problem with that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing, join
from anyrank.files.manifest import FORMAT
from anyrank.files.quantised import dequantised, unknown_method, without_scales
from anyrank.formats.tables import idle_renames, weights_for
from anyrank.frozen.freeze import FrozenSource, frozen_info
from anyrank.model.conversions import converted, declared_ignorable, pretrained
from anyrank.model.fits import find_misfit, parametrised, shared_on_meta, unwritable
from anyrank.model.given_layouts import cut_as_source
from anyrank.model.options import WAYS, LoadOptions
from anyrank.model.own_code import OwnCode
from anyrank.model.peft import BASE_FIRST, merged_layers, unknown_adapters
from anyrank.model.tensors import (
    ModelTensor,
    NamedModule,
    find_modules,
    find_tensors,
    in_state_dict,
    tensors_of,
)
from anyrank.tensors.names import (
    Near,
    candidates,
    match_keys,
    renamer,
    wrong_prefix,
)
from anyrank.tensors.quantised import is_wide
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import first_few

log = logging.getLogger("anyrank.load")

SHOWN = 10
RESIZED = 4  # tensors: an embedding and a head, with their biases
AVERAGED = "n_averaged"  # of torch's AveragedModel: how often, and no weight of the model in it
LIVE = "live"  # format of a listing of a model's own tensors, which has no files


@dataclass(frozen=True)
class ModelMatch:
    """What fills each tensor of a model, as this rank sees its own model and the source.

    Attributes:
        tensors: every tensor of the model; the numbers below are positions in it.
        listing: the source under the model's names, with the sources of frozen parts.
        stored: tensor -> its bytes.
        compared: tensor of a frozen part -> bytes that must be what the tensor holds in the end.
        initialise: tensors that a rule fills.
        keep: missing tensors that keep their values.
        missing: names of the tensors that the source does not hold, adapters aside.
        unexpected: keys of the source that the model has no use for.
        duplicates: keys of a tied tensor's other ends -> the key that is loaded.
        ignored: unexpected keys that need no tensor; `_ignorable` says which.
        frozen: frozen parts -> the source of their own that fills them.
        own_code: code of modules that load_state_dict would have run.
        idle: entries of `rename=` that match no key, in words.
    """

    tensors: list[ModelTensor]
    listing: Listing
    stored: dict[int, StoredTensor] = field(default_factory=dict[int, StoredTensor])
    compared: dict[int, StoredTensor] = field(default_factory=dict[int, StoredTensor])
    initialise: list[int] = field(default_factory=list[int])
    keep: list[int] = field(default_factory=list[int])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    duplicates: dict[str, str] = field(default_factory=dict[str, str])
    ignored: list[str] = field(default_factory=list[str])
    frozen: dict[str, str] = field(default_factory=dict[str, str])
    own_code: OwnCode = field(default_factory=OwnCode)
    idle: list[str] = field(default_factory=list[str])

    def with_tensors(self, tensors: list[ModelTensor]) -> ModelMatch:
        """The same match of a model with the same tensors, or of none."""
        return replace(self, tensors=tensors)

    @property
    def filled(self) -> list[tuple[int, StoredTensor]]:
        """Every tensor that bytes are read for: those of `stored`, then of `compared`."""
        return [*self.stored.items(), *self.compared.items()]

    @property
    def tied(self) -> dict[str, list[str]]:
        """Tensors that the model has in several places -> their other names."""
        shared = (t for t in self.tensors if len(t.registrations) > 1)
        return {t.name: [entry.name for entry in t.registrations[1:]] for t in shared}

    @property
    def stored_twice(self) -> dict[str, str]:
        """Those of `duplicates` that have bytes of their own, which may be other values."""
        chunks = {key: stored.chunks for key, stored in self.listing.tensors.items()}
        return {key: k for key, k in self.duplicates.items() if chunks[key] != chunks[k]}


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
    loadable = [i for i, tensor in enumerate(tensors) if tensor.kind != "derived"]
    is_live = listing.format == LIVE
    # A run holds tensors as they were in the model, which no code has changed on the way.
    is_raw = is_live or listing.format == FORMAT
    source = chosen = listing
    if not is_live:
        dtypes = _dtypes_by_name(tensors)
        chosen = weights_for(dtypes, listing, renamer(options.rename) if options.rename else None)
        listing = dequantised(chosen, dtypes, renamer(options.rename))
    idle = idle_renames(options.rename, source, chosen, listing.tensors)
    inner = pretrained(model)
    listing, rename = converted(inner, tensors, listing, renamer(options.rename))
    matched = match_keys([tensors[i].all_names() for i in loadable], listing.tensors, rename)
    stored = {loadable[i]: listing.tensors[key] for i, key in matched.keys.items()}
    listing, frozen, compared = _fill_frozen(modules, tensors, stored, listing, parts or {})
    filled = [*stored.items(), *compared.items()]
    if not is_live:
        for index, tensor in filled:
            cut_as_source(tensors[index], tensor.shape)
    empty = {loadable[n] for n in matched.missing}.difference(stored, compared)
    missing = [i for i in sorted(empty) if not (is_live and is_pinned(tensors[i]))]
    ignored = _ignorable(matched.unexpected, tensors, inner, rename)
    own_code = OwnCode([] if is_raw else modules, listing, renamer(options.rename))
    of_no_use = {*ignored, *own_code.tensor_keys}
    if is_live:
        of_no_use |= _tied_to(filled, listing)
    unexpected = [key for key in matched.unexpected if key not in of_no_use]
    absent = [i for i in missing if not tensors[i].adapter]
    init = options.missing == "init"
    initialise = [i for i in missing if tensors[i].is_meta or (init and not tensors[i].adapter)]
    keep = sorted(set(missing).difference(initialise))
    problems = _problems(tensors, filled, absent, unexpected, options)
    problems += _unread(listing, tensors, absent, renamer(options.rename))
    problems += _untied(inner, tensors, missing)
    problems += parametrised(tensors[i] for i in initialise)
    problems += shared_on_meta(tensors)
    problems += _quantised_problems(
        listing, tensors, filled, renamer(options.rename), bool(absent or unexpected)
    )
    problems += _adapter_problems(
        tensors, filled, unknown_adapters(tensors, stored, initialise, keep)
    )
    if problems:
        raise LoadError("\n".join([_title(listing), *problems, *_skipped(listing)]))
    return ModelMatch(
        tensors=tensors,
        listing=listing,
        stored=stored,
        compared=compared,
        initialise=initialise,
        keep=keep,
        missing=[tensors[i].name for i in absent],
        unexpected=unexpected,
        duplicates=matched.duplicates,
        ignored=ignored,
        frozen=frozen,
        own_code=own_code,
        idle=idle,
    )


def warn_of_idle(match: ModelMatch) -> None:
    """Warn of entries of `rename=` that match no key."""
    if match.idle:
        log.warning("%s", "; ".join(first_few(match.idle, SHOWN)))


def match_of_rules(tensors: list[ModelTensor], initialise: list[int]) -> ModelMatch:
    """A match without a source: rules fill some of the tensors, and the others stay as they are."""
    return ModelMatch(tensors, Listing("initial values", (), {}), initialise=initialise)


def _tied_to(filled: list[tuple[int, StoredTensor]], listing: Listing) -> set[str]:
    """In a live source: the other names of the tensors that are used."""
    used = {chunk.file for _, stored in filled for chunk in stored.chunks}
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


def _fill_frozen(
    modules: Sequence[NamedModule],
    targets: list[ModelTensor],
    stored: dict[int, StoredTensor],
    listing: Listing,
    parts: Mapping[FrozenSource, Listing],
) -> tuple[Listing, dict[str, str], dict[int, StoredTensor]]:
    """Fill frozen parts from their own sources; what the source holds of them is for comparison.

    A live source holds them itself.
    """
    frozen: dict[str, str] = {}
    compared: dict[int, StoredTensor] = {}
    by_part = {owner.module: owner.raw for owner in reversed(modules)}
    for part, name in by_part.items() if listing.format != LIVE else ():
        info = frozen_info(part)
        source = info.source if info else None
        if source is None:
            continue
        own_tensors = [i for i, t in enumerate(targets) if t.frozen is part and t.kind != "derived"]
        indices = [i for i in own_tensors if i not in stored or targets[i].is_meta]
        if not indices:
            continue
        inner = in_state_dict(find_tensors(part))
        own_listing = dequantised(parts[source], _dtypes_by_name(inner))
        matched = match_keys(
            [target.all_names() for target in inner], own_listing.tensors, lambda key: key
        )
        keys = {id(inner[n].tensor): key for n, key in matched.keys.items()}
        lacking = [targets[i].name for i in indices if id(targets[i].tensor) not in keys]
        if lacking:
            title = f"{name or 'the model'}: is frozen with source {source}, which does not hold"
            raise LoadError(listed(title, lacking) + "\n  freeze it with the file that holds it")
        prefix = f"{name}/"  # no key of the source can be meant by it
        renamed = {prefix + key: tensor for key, tensor in own_listing.tensors.items()}
        listing = join(listing.format, [listing, own_listing.with_tensors(renamed)])
        for index in indices:
            if index in stored:
                compared[index] = stored[index]
            stored[index] = listing.tensors[prefix + keys[id(targets[index].tensor)]]
        frozen[name] = str(source)
    for index in [index for index in stored if is_pinned(targets[index])]:
        compared[index] = stored.pop(index)
    return listing, frozen, compared


def is_pinned(target: ModelTensor) -> bool:
    """Whether a tensor belongs to a frozen part with a source, whole and real: never written to."""
    info = None if target.frozen is None else frozen_info(target.frozen)
    if info is None or info.source is None:
        return False
    return info.tensors is not None and not target.is_meta


def _unread(
    listing: Listing, targets: list[ModelTensor], absent: list[int], rename: Callable[[str], str]
) -> list[str]:
    """Missing tensors of which the source has something that is not read: first values would stand
    in for weights that are there.
    """
    wanted = {name for index in absent for name in targets[index].flat_names()}
    return [
        f"{key}: is {what}, which is not read, and missing= stands for what a source has not"
        for key, what in listing.unreadable.items()
        if not wanted.isdisjoint(candidates(rename(key)))
    ]


def _untied(inner: Any, targets: list[ModelTensor], missing: list[int]) -> list[str]:
    """Missing tensors that a transformers model declares tied, and that are not: `to_empty` breaks
    ties.
    """
    declared: dict[str, str] = getattr(inner, "all_tied_weights_keys", None) or {}
    pairs = [
        f"{name} = {declared[name]}"
        for index in missing
        for name in targets[index].registrations[0].names
        if name in declared
    ]
    if not pairs:
        return []
    title = "missing in the source, and declared tied by the model, which has two tensors there"
    return [listed(title, pairs) + "\n  to go on: model.tie_weights(), which to_empty() undoes"]


def _ignorable(
    keys: Sequence[str], targets: list[ModelTensor], inner: Any, rename: Any
) -> list[str]:
    """Keys of non-persistent buffers and of a count of averaged steps, keys that the model declares
    ignorable, and those that `rename=` gives no name.
    """
    derived = {n for target in targets if target.kind == "derived" for n in target.flat_names()}
    prefix = getattr(inner, "base_model_prefix", "")
    declared = declared_ignorable(inner)
    return [
        key
        for key in keys
        for name in (rename(key),)
        if not derived.isdisjoint((name, f"{prefix}.{name}"))
        or declared(key)
        or name in ("", AVERAGED)
    ]


def _problems(
    targets: list[ModelTensor],
    stored: list[tuple[int, StoredTensor]],
    absent: list[int],
    unexpected: list[str],
    options: LoadOptions,
) -> list[str]:
    """Everything that is wrong with names, shapes and dtypes, in one list."""
    on_meta = [targets[i].name for i in absent if targets[i].is_meta]
    unfilled = [targets[i].name for i in absent]
    unfilled = [name for name in unfilled if not options.is_fresh(name) or name in on_meta]
    lines: list[str] = []
    if options.missing == "error" and unfilled:
        lines.append(
            listed("missing in the source", unfilled, Near(unexpected))
            + f"\n  to go on: {options.ways['missing']}"
        )
    elif options.missing == "keep" and on_meta:
        lines.append(
            listed("missing in the source, and on meta, so there is nothing to keep", on_meta)
            + "\n  to go on: missing='init'"
        )
    if options.unexpected == "error" and unexpected:
        lines.append(
            listed("unexpected in the source", unexpected, Near(unfilled or _names(targets)))
            + _renaming(unexpected, unfilled)
            + f"\n  to go on: {options.ways['unexpected']}"
        )
    fits = (unwritable(targets[i]) or find_misfit(targets[i], t, options.cast) for i, t in stored)
    misfits = [line for line in fits if line]
    lines += misfits[:SHOWN]
    if len(misfits) > SHOWN:
        lines.append(f"... and {len(misfits) - SHOWN} more that do not fit")
    resized = [t.name for i, t in stored if t.shape != targets[i].shape]
    # More are another model's; a resume has ways of its own.
    if resized and len(resized) <= RESIZED and options.ways is WAYS:
        left_out = dict.fromkeys(resized, "")
        lines.append(
            "  to go on: a model of the source's sizes; or, for a vocabulary or a head of another "
            f"size, rename={left_out!r} with missing='init'"
        )
    return lines


def _names(targets: list[ModelTensor]) -> list[str]:
    return [entry.name for target in targets for entry in target.registrations]


def _dtypes_by_name(tensors: list[ModelTensor]) -> dict[str, torch.dtype]:
    """The dtypes of what a checkpoint holds of the model, by all of its names."""
    return {name: t.dtype for t in in_state_dict(tensors) for name in t.flat_names()}


def _quantised_problems(
    listing: Listing,
    targets: list[ModelTensor],
    filled: list[tuple[int, StoredTensor]],
    rename: Callable[[str], str],
    has_other_problems: bool,
) -> list[str]:
    """Small numbers that would be taken for weights."""
    wide = [stored for i, stored in filled if is_wide(targets[i].dtype)]
    unknown = unknown_method(listing)
    if unknown and (has_other_problems or any(not is_wide(stored.dtype) for stored in wide)):
        return [unknown]
    places = {(chunk.file, chunk.offset) for _, stored in filled for chunk in stored.chunks}
    used = {
        stored.name
        for stored in listing.tensors.values()
        if any((chunk.file, chunk.offset) in places for chunk in stored.chunks)
    }
    problems = without_scales(listing, wide, lambda key: key not in used and rename(key) != "")
    return problems[:SHOWN]


def _adapter_problems(
    targets: list[ModelTensor], filled: list[tuple[int, StoredTensor]], unknown: list[str]
) -> list[str]:
    """Adapters that are in the base, or that PEFT may compute from it."""
    lines: list[str] = []
    merged = merged_layers(targets[index] for index, _ in filled)
    if merged:
        title = "adapters are merged into these layers: call unmerge_adapter() first"
        lines.append(listed(title, merged))
    if unknown:
        title = "not in the source, and no plain LoRA: PEFT may compute these from the base weights"
        lines.append(listed(title, unknown) + f"\n  to go on: {BASE_FIRST}")
    return lines


def listed(title: str, items: list[str], hints: Near | None = None) -> str:
    """The first few of many names, with hints at what they may be meant for."""
    shown = [f"{item}{hints.hint(item) if hints else ''}" for item in items[:SHOWN]]
    lines = [*shown, *first_few(items, SHOWN)[SHOWN:]]
    return f"{title} ({len(items)}):\n  " + "\n  ".join(lines)


def _renaming(unexpected: list[str], unfilled: list[str]) -> str:
    """The rename= that places most of the keys, where a prefix is all that is wrong."""
    change = wrong_prefix(unexpected, unfilled)
    if change is None:
        return ""
    old, new, count = change
    rename = {old.removesuffix("."): new.removesuffix(".")} if old else [("^", new)]
    return f"\n  {count} of them fit with rename={rename!r}"
