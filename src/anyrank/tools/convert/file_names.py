"""The tensors of a transformers model under the names of its checkpoints, and its configuration.

transformers renames, fuses and stacks tensors while it loads. Its own code that reverts this when a
model is saved runs here on symbolic tensors, so no values are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.content_hash import content_hash
from anyrank.files.listing import EXTRA_STATE, Listing
from anyrank.files.reader import Reader
from anyrank.models.dialects.transformers.conversions import conversion_code, pretrained
from anyrank.models.dialects.transformers.symbolic import SymbolicTensor
from anyrank.models.plain_copies import plain_copy
from anyrank.models.tensors import ModelTensor, find_tensors, in_state_dict
from anyrank.models.wrappers import plain_class
from anyrank.sources.part_names import is_other_part
from anyrank.sources.tables.choice import inner_prefix
from anyrank.tensors.names import AVERAGED, candidates
from anyrank.tensors.near_names import near, rename_of, wrong_prefix
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tools.convert.selection import Selection
from anyrank.wording import count

BUFFER_BYTES = 4 << 20
Tensors = dict[str, StoredTensor]


def as_files(
    selection: Selection,
    listing: Listing,
    model: nn.Module,
    targets: Sequence[ModelTensor] | None = None,
) -> Selection:
    """Rename the tensors of a source to the file names of a model, with the ties of the model.

    Args:
        selection: the selected tensors of the source.
        listing: the source, which may already have the file names.
        model: real or on meta.
        targets: its tensors under the requested names. Default: all of them, `without_average`.

    Raises:
        LoadError: the source does not match the model, a tied tensor has two values, or a
            conversion computes values.
    """
    targets = without_average(find_tensors(model)) if targets is None else targets
    ties = _ties_of(model, targets)
    if listing.is_file_named:
        return _tied(selection, listing, ties)
    named = in_state_dict(targets)
    live = {name: t.registrations[0].name for t in named for name in t.flat_names()}
    selection = _in_table(selection, live)
    tensors: Tensors = {}
    renamed = dict(selection.renamed)
    unknown: Tensors = {}
    others: list[str] = []
    extras: Tensors = {}  # extra state of modules, which targets do not include
    for name, stored in selection.tensors.items():
        hit = next((live_name for live_name in candidates(name) if live_name in live), None)
        if hit is None and is_other_part(name):
            others.append(f"{name}: not weights")
        elif hit is None and name.rpartition(".")[2] == EXTRA_STATE:
            extras[name] = stored
        elif hit is None:
            unknown[name] = stored
        else:
            tensors[hit] = stored
    tied = {ties.get(name, name): kept for name, kept in selection.tied.items()}
    selection = _tied(replace(selection, tensors=tensors), listing, ties)
    lacking = {*live.values()} - {*selection.tensors} - {*selection.tied} - {*tied}
    if unknown or lacking:
        shapes = {target.name: target.shape for target in named if target.name in lacking}
        keys = {name: stored.shape for name, stored in unknown.items()}
        raise LoadError(_mismatch_text(model, keys, sorted(lacking), wrong_prefix(keys, shapes)))
    files = _file_named(model, selection.tensors)
    by_chunks = {stored.chunks: name for name, stored in files.items()}
    for name, stored in selection.tensors.items():
        if (new := by_chunks.get(stored.chunks, name)) != name:
            renamed[name] = new
    skipped = (*selection.skipped, *others)
    return replace(selection, tensors=files | extras, renamed=renamed, skipped=skipped)


def without_average(tensors: list[ModelTensor]) -> list[ModelTensor]:
    """Return the tensors of a model, without the names that torch's AveragedModel adds and without
    its counter, as `select` does for a file.
    """
    kept = [tensor for tensor in tensors if tensor.name != AVERAGED]
    entries = [entry for tensor in kept for entry in tensor.registrations]
    if not entries or not all(entry.name.startswith("module.") for entry in entries):
        return tensors
    plain: list[ModelTensor] = []
    for tensor in kept:
        places = [e._replace(name=e.name.removeprefix("module.")) for e in tensor.registrations]
        plain.append(replace(tensor, name=places[0].name, registrations=places))
    return plain


def _mismatch_text(
    model: nn.Module,
    unknown: Collection[str],
    missing: Sequence[str],
    changes: Sequence[tuple[str, str, int]],
) -> str:
    """Return the error text for a source that does not match a model.

    Args:
        model: the model.
        unknown: names of the source that the model does not have.
        missing: names of the model that the source does not have.
        changes: changes of prefix by which they would match.
    """
    first = next(iter(unknown or missing))
    hint = near(first, missing) if unknown else ""
    renames = " or ".join(f"rename={rename_of(old, new)!r}" for old, new, _ in changes)
    return (
        f"the source does not match this {plain_class(model).__name__}: the model lacks "
        f"{count(len(unknown), 'key')} of the source, and the source lacks "
        f"{count(len(missing), 'tensor')} of the model. The first is {first}{hint}. Pass the "
        f"model= that the source was saved from, or {renames or 'rename='}"
    )


def _in_table(selection: Selection, known: Collection[str]) -> Selection:
    """Select the table of weights in a checkpoint with several, by the model, as `load` does."""
    names = [*selection.tensors, *selection.tied]
    prefix = inner_prefix(names, known)
    if prefix is None:
        return selection
    keys = {name: key for key, name in selection.renamed.items()}
    inner = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    owners = {name: name for name in selection.tensors} | selection.tied
    first: dict[str, str] = {}  # an owner may be outside of the table, and its bytes inside
    for name in inner:
        first.setdefault(owners[name], name)
    tensors = {inner[name]: selection.tensors[owner] for owner, name in first.items()}
    tied = {
        inner[name]: inner[first[owners[name]]] for name in inner if first[owners[name]] != name
    }
    outer = {name: new for name, new in selection.renamed.items() if new not in inner}
    renamed = outer | {keys.get(name, name): new for name, new in inner.items()}
    others = tuple(
        f"{keys.get(name, name)}: of another table" for name in names if name not in inner
    )
    return Selection(tensors, tied, renamed, (*selection.skipped, *others), selection.left_out)


def _file_named(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> Tensors:
    """Rename tensors to the names under which transformers saves them; other models keep theirs.

    Raises:
        LoadError: a conversion computes values; or as for `conversion_code`.
    """
    inner = pretrained(model)
    if inner is None:
        return dict(tensors)
    revert = conversion_code().revert_weight_conversion
    symbolic: Any = {name: SymbolicTensor(stored) for name, stored in tensors.items()}
    try:
        reverted: dict[str, Any] = revert(plain_copy(inner), symbolic)
    except Exception as error:  # from code of transformers, or anyrank's code that it calls
        text = f"transformers cannot name the tensors of {type(inner).__name__} in files"
        raise LoadError(f"{text}: {error!r}") from error
    return {name: tensor.stored.renamed(name) for name, tensor in reverted.items()}


def _ties_of(model: nn.Module, targets: Iterable[ModelTensor]) -> dict[str, str]:
    """Return name -> the name that holds the values, for tensors that are tied in the model.

    The list of transformers only says which name is kept, because a merged adapter may have untied
    tensors in the list.
    """
    declared = getattr(pretrained(model), "all_tied_weights_keys", None) or {}
    ties: dict[str, str] = {}
    for target in targets:
        names = [registration.name for registration in target.registrations]
        kept = next((name for name in names if name not in declared), names[0])
        ties |= {name: kept for name in names if name != kept}
    return ties


def _tied(selection: Selection, listing: Listing, ties: Mapping[str, str]) -> Selection:
    """Drop the second copies of tied tensors, which must have the same values.

    Raises:
        LoadError: they hold different values.
    """
    tensors, tied = dict(selection.tensors), dict(selection.tied)
    with Reader(listing, buffer_bytes=BUFFER_BYTES) as reader:
        for name, kept in ties.items():
            if tied.get(kept) == name:  # the other name is kept
                tensors[kept] = tensors.pop(name).renamed(kept)
                tied.pop(kept)
                tied[name] = kept
            elif name in tensors and kept not in tensors:
                tensors[kept] = tensors.pop(name).renamed(kept)
                tied[name] = kept
            elif name in tensors:
                pair = [content_hash(reader.read(tensors[key])) for key in (name, kept)]
                if pair[0] != pair[1]:
                    raise LoadError(
                        f"{name} and {kept} are tied in the model, but differ in the source. Pass "
                        "a model= that does not tie them, or correct the source"
                    )
                del tensors[name]
                tied[name] = kept
    return replace(selection, tensors=tensors, tied=tied)


def configuration(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Return config.json and generation_config.json of a transformers model; else nothing."""
    inner = pretrained(model)
    if inner is None:
        return {}
    config: dict[str, Any] = json.loads(inner.config.to_json_string())
    config["architectures"] = [plain_class(inner).__name__]
    config["dtype"] = dtype_name(dtype or inner.dtype)  # from_pretrained casts to it
    files = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
    generation: Any = getattr(inner, "generation_config", None)
    if generation is not None and inner.can_generate():
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
