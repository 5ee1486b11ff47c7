"""Dialects: what one library changes in torch models, as answers to the questions of a match.

A dialect knows the names, the files and the values of one library. A match asks one question at a
time, in the order of `DIALECTS` (`registry.py`), the first of every dialect, the others of those
that apply:

1. `values`: numbers that a library stores in a different form become weights. This needs no model.
   A live source has the values with which its model computes, so it is not asked.
2. `names`: keys become the model's names. (Then the match finds the key of each tensor.)
3. `complete`: frozen parts get the bytes of their own sources; then tensors with a `layout=` are
   cut to match the source's tensors.
4. `needs_no_tensor`: says which unused keys are harmless.
5. `problems`: reports errors when everything else is known, such as what fills an adapter's base.

The order of the questions matters: a conversion of names may fuse weights, so they must be weights
by then; a part's own source fills only tensors without a key. The order of the dialects matters
only for `complete`, and for the order of the problems in an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from anyrank.files.listing import Listing
from anyrank.models.frozen_parts import FrozenSource
from anyrank.models.options import LoadOptions
from anyrank.models.own_code import OwnCode
from anyrank.models.tensors import ModelTensor, NamedModule, in_state_dict
from anyrank.sources.tables.renaming import Renamer, renamer
from anyrank.tensors.spec import StoredTensor


@dataclass(frozen=True)
class Case:
    """One model and one source to match.

    Attributes:
        modules, tensors: all modules and tensors of the model to fill.
        source: the weights in the source, by the source's own keys.
        options: the caller's options.
        parts: contents of the sources of the model's frozen parts.
        classes: the classes of all dialects, in the order in which they are asked.
    """

    modules: Sequence[NamedModule]
    tensors: list[ModelTensor]
    source: Listing
    options: LoadOptions
    parts: Mapping[FrozenSource, Listing] = field(default_factory=dict[FrozenSource, Listing])
    classes: Sequence[type[Dialect]] = ()

    @property
    def model(self) -> nn.Module:
        """The model to fill."""
        return self.modules[0].module

    @property
    def is_live(self) -> bool:
        """True if the source is a model in memory, and not a stored one."""
        return self.source.is_live

    @cached_property
    def derived(self) -> set[str]:
        """The names of the non-persistent buffers, which a checkpoint need not have."""
        derived = (tensor for tensor in self.tensors if tensor.kind == "derived")
        return {name for tensor in derived for name in tensor.flat_names()}

    @cached_property
    def rename(self) -> Renamer:
        """The function for `rename=`, from keys of the source to the caller's names."""
        return renamer(self.options.rename)


@dataclass(frozen=True)
class ModelMatch:
    """Which bytes of a source, or which rule, fill each tensor of this rank's model.

    Attributes:
        tensors: every tensor of the model; numbers in the other attributes are positions in this
            list.
        listing: the source under the model's names, with the sources of frozen parts.
        stored: tensor -> its bytes.
        compared: tensor of a frozen part -> bytes that its values must match in the end.
        initialize: tensors that a rule fills.
        keep: missing tensors that keep their values.
        absent: tensors that the source should have, but does not.
        twins: tensors with the memory of an earlier one, which get their values with that.
        unexpected: keys of the source that the model does not need.
        duplicates: other keys of a tied tensor -> the key that is loaded.
        turned: those of these keys whose tensors are transposed views.
        ignored: unexpected keys that need no tensor.
        frozen: frozen parts -> the own source that fills them.
        own_code: code of modules that load_state_dict would have run.
        idle: notes about entries of `rename=` that match no key.
    """

    tensors: list[ModelTensor]
    listing: Listing
    stored: dict[int, StoredTensor] = field(default_factory=dict[int, StoredTensor])
    compared: dict[int, StoredTensor] = field(default_factory=dict[int, StoredTensor])
    initialize: list[int] = field(default_factory=list[int])
    keep: list[int] = field(default_factory=list[int])
    absent: list[int] = field(default_factory=list[int])
    twins: dict[int, int] = field(default_factory=dict[int, int])
    unexpected: list[str] = field(default_factory=list[str])
    duplicates: dict[str, str] = field(default_factory=dict[str, str])
    turned: frozenset[str] = frozenset()
    ignored: list[str] = field(default_factory=list[str])
    frozen: dict[str, str] = field(default_factory=dict[str, str])
    own_code: OwnCode = field(default_factory=OwnCode)
    idle: list[str] = field(default_factory=list[str])

    def with_tensors(self, tensors: list[ModelTensor]) -> ModelMatch:
        """Return the match for a model with the same tensors, or without tensors."""
        return replace(self, tensors=tensors)

    @property
    def missing(self) -> list[str]:
        """The names of the `absent` tensors, for reports."""
        return [self.tensors[index].name for index in self.absent]

    @property
    def wanted(self) -> list[tuple[int, StoredTensor]]:
        """Every tensor for which bytes are read: those of `stored`, then those of `compared`."""
        return [*self.stored.items(), *self.compared.items()]

    @property
    def tied(self) -> dict[str, list[str]]:
        """Map the names of tied tensors to their other names."""
        shared = (t for t in self.tensors if len(t.registrations) > 1)
        tied = {t.name: [entry.name for entry in t.registrations[1:]] for t in shared}
        for twin, first in self.twins.items():
            others = [entry.name for entry in self.tensors[twin].registrations]
            tied.setdefault(self.tensors[first].name, []).extend(others)
        return tied

    @property
    def stored_twice(self) -> dict[str, str]:
        """The `duplicates` with separate bytes, which may be different values."""
        chunks = {key: stored.chunks for key, stored in self.listing.tensors.items()}
        return {key: k for key, k in self.duplicates.items() if chunks[key] != chunks[k]}


class Dialect:
    """The dialect of one library, opened for one match. The default answers change nothing.

    Args:
        case: the model and source to match.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether a dialect may have answers for a case, besides `values`; must be cheap."""
        return False

    @staticmethod
    def values(listing: Listing, dtypes: Mapping[str, torch.dtype], rename: Renamer) -> Listing:
        """Return a source, by its own keys, with tensors in place of the library's stored forms,
        and without the `quantization` that this handles.

        Args:
            listing: a stored source.
            dtypes: name -> dtype of the tensor to fill; empty if all must be floating-point.
            rename: maps the source's keys to these names.

        Raises:
            LoadError: a stored form lacks a part, or its parts do not match.
        """
        return listing

    def names(self, listing: Listing, rename: Renamer) -> tuple[Listing, Renamer]:
        """Return the source with the model's names, and the renaming that is left to do.

        Raises:
            LoadError: a tensor of the model is only partly in the source, or would have to be
                computed.
        """
        return listing, rename

    def complete(self, match: ModelMatch) -> ModelMatch:
        """Add other bytes that fill tensors; `tensors`, `listing`, `stored`, `compared` are known.

        No tensor is changed.

        Raises:
            LoadError: a tensor is not in the source that must fill it.
        """
        return match

    def needs_no_tensor(self, key: str, name: str) -> bool:
        """Return whether an unused key is harmless; `name` is the key after the renaming."""
        return False

    def problems(self, match: ModelMatch) -> list[str]:
        """Return the problems of a complete match, each with its way out; changes nothing."""
        return []


def dialects_of(case: Case) -> list[Dialect]:
    """Return the dialects that apply to a case, in the order in which they are asked."""
    return [kind(case) for kind in case.classes if kind.applies(case)]


def with_values(
    listing: Listing,
    classes: Iterable[type[Dialect]],
    dtypes: Mapping[str, torch.dtype],
    rename: Renamer = lambda key: key,
) -> Listing:
    """Return a source with the `values` of all dialects; see there for arguments and errors."""
    for kind in classes:
        listing = kind.values(listing, dtypes, rename)
    return listing


def with_names(
    listing: Listing, rename: Renamer, dialects: Iterable[Dialect]
) -> tuple[Listing, Renamer]:
    """Return a source with the `names` of all dialects; see there for the errors."""
    for dialect in dialects:
        listing, rename = dialect.names(listing, rename)
    return listing, rename


def dtypes_of(tensors: Iterable[ModelTensor]) -> dict[str, torch.dtype]:
    """Map all names of the tensors that a checkpoint has for a model to their dtypes."""
    return {name: t.dtype for t in in_state_dict(tensors) for name in t.flat_names()}


def match_of_rules(tensors: list[ModelTensor], initialize: list[int]) -> ModelMatch:
    """Return a match without a source: rules fill some tensors, and the others are unchanged."""
    return ModelMatch(tensors, Listing("initial values", (), {}), initialize=initialize)
