"""The key conversions of transformers models, which run on headers instead of tensors.

transformers renames keys, and fuses, stacks or splits tensors while it loads. Its own patterns and
operations are applied here to symbolic tensors, so that fused experts are read row by row like any
other tensor. This is used only if the process has imported transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.transformers.symbolic import SymbolicTensor
from anyrank.models.plain_copies import plain_copy
from anyrank.models.tensors import ModelTensor, NamedModule, in_state_dict
from anyrank.sources.tables.renaming import Renamer
from anyrank.tensors.names import PEFT_PREFIX, candidates, is_of_adapter
from anyrank.tensors.spec import StoredTensor
from anyrank.versions import TESTED, warn_if_untested
from anyrank.wording import listed

# Buffers that are no longer saved; transformers ignores them in files of any model that has them.
OLD_BUFFERS = (r"rotary_emb\.inv_freq", "position_ids")
CODE = {
    "conversion_mapping": ("get_model_conversion_mapping",),
    "core_model_loading": (
        "WeightConverter",
        "WeightRenaming",
        "dot_natural_key",
        "rename_source_key",
        "revert_weight_conversion",
    ),
}


class ConvertedNames(Dialect):
    """The names that tensors of transformers models have in files."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether the process can have transformers models."""
        return "transformers.modeling_utils" in sys.modules

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.inner = pretrained(case.model)
        self.ignorable = _ignorable(case)
        self.prefix = getattr(self.inner, "base_model_prefix", "")

    def names(self, listing: Listing, rename: Renamer) -> tuple[Listing, Renamer]:
        """Return the source with the names of the live model."""
        return converted(self.inner, self.case.tensors, listing, rename)

    def needs_no_tensor(self, key: str, name: str) -> bool:
        """Return whether transformers ignores a key for this model, or computes the buffer."""
        if f"{self.prefix}.{name}" in self.case.derived:
            return True
        return any(
            other.startswith(start) and pattern.search(other[len(start) :]) is not None
            for start, pattern in self.ignorable
            for other in candidates(name)
        )

    def problems(self, match: ModelMatch) -> list[str]:
        """Report missing tensors that the model declares tied but are separate, because of
        `to_empty`.
        """
        declared: dict[str, str] = getattr(self.inner, "all_tied_weights_keys", None) or {}
        pairs = [
            f"{name} = {declared[name]}"
            for index in sorted([*match.initialize, *match.keep])
            for name in match.tensors[index].registrations[0].names
            if name in declared
        ]
        if not pairs:
            return []
        title = "missing from the source, and declared tied by the model, but separate tensors"
        return [
            listed(title, pairs)
            + "\n  Fix: call model.tie_weights(), because to_empty() has untied them"
        ]


def converted(
    inner: Any, targets: list[ModelTensor], listing: Listing, rename: Callable[[str], str]
) -> tuple[Listing, Callable[[str], str]]:
    """Return the listing with the model's names, and the renaming that is left to do.

    Args:
        inner: the transformers model to fill, from `pretrained`; if None, nothing is converted.
        targets: tensors of the whole model.
        listing: the source.
        rename: the caller's renaming.

    Raises:
        LoadError: a conversion computes values, or some of its parts are missing from the source.
    """
    if inner is None:
        return listing, rename
    live = {name for target in in_state_dict(targets) for name in target.flat_names()}
    if _fits_as_it_is(targets, listing, rename):
        return listing, rename
    tensors: dict[str, StoredTensor] = {}
    pending: dict[str, StoredTensor] = {}
    first: dict[str, str] = {}  # name -> key
    converter = _Converter(inner, live)
    for key, stored in listing.tensors.items():
        renamed = rename(key)
        direct = next((name for name in candidates(renamed) if name in live), None)
        live_named = not listing.is_file_named or is_of_adapter(renamed)
        if direct is not None and live_named:
            name, part = renamed, tensors
        else:
            name = renamed if direct is None else direct
            name, part = name.removeprefix("module.").removeprefix(PEFT_PREFIX), pending
        if name in part and (part is tensors or converter.means_tensor(name)):
            raise LoadError(
                f"{first[name]} and {key} of the source both mean {name}; rename one of them"
            )
        part[name], first[name] = stored, key
    tensors.update(converter.run(pending))
    return listing.with_tensors(tensors), lambda key: key


def _fits_as_it_is(
    targets: list[ModelTensor], listing: Listing, rename: Callable[[str], str]
) -> bool:
    """Return whether names and shapes match already, because to build the mapping takes 0.3 s.

    Only transposes of stacked experts keep a name, so 3-d tensors whose shape would not change
    prove nothing.
    """
    loadable = in_state_dict(targets)
    shapes = {name: target.shape for target in loadable for name in target.flat_names()}
    for key, stored in listing.tensors.items():
        shape = next((shapes[n] for n in candidates(rename(key)) if n in shapes), None)
        if shape is None or shape != stored.shape or (len(shape) == 3 and shape[1] == shape[2]):
            return False
    filled = {name for key in listing.tensors for name in candidates(rename(key))}
    return all(not filled.isdisjoint(target.flat_names()) for target in loadable)


def _ignorable(case: Case) -> list[tuple[str, re.Pattern[str]]]:
    """Return the names of transformers models in a model, with patterns of the keys to ignore."""
    kind = _model_class()
    rules: list[tuple[str, re.Pattern[str]]] = []
    for owner in case.modules:
        if kind is None or not isinstance(owner.module, kind):
            continue
        patterns = [*(getattr(owner.module, "_keys_to_ignore_on_load_unexpected", None) or ())]
        # Files of GPT-2 before transformers 4.30 have it next to attn.bias, which is ignored.
        patterns += [r"attn\.masked_bias"] if "attn.bias" in patterns else []
        # Older files contain these buffers, even if different modules had them.
        patterns += [rf"(^|\.){buffer}$" for buffer in OLD_BUFFERS if _has_buffer(owner, buffer)]
        if patterns:
            start = f"{owner.name}." if owner.name else ""
            rules.append((start, re.compile("|".join(f"({pattern})" for pattern in patterns))))
    return rules


def _has_buffer(owner: NamedModule, end: str) -> bool:
    return any(re.search(rf"(^|\.){end}$", name) for name, _ in owner.module.named_buffers())


def pretrained(model: nn.Module) -> Any:
    """Return the transformers model inside the wrappers, with its class from before FSDP2."""
    kind = _model_class()
    if kind is None:
        return None
    for _ in range(8):
        if isinstance(model, kind):
            return model
        names = ("module", "_orig_mod", "base_model", "model")
        children = (dict(model.named_children()).get(name) for name in names)
        inner = next((child for child in children if child is not None), None)
        if inner is None or len(list(model.parameters())) != len(list(inner.parameters())):
            return None
        model = inner
    return None


def _model_class() -> type[nn.Module] | None:
    """Return the class of transformers models; None if no such model can exist.

    That is so if the import of transformers is blocked, or another thread is still importing it.
    """
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def conversion_code() -> Any:
    """Return the private functions of transformers' conversion that are used, by name.

    Raises:
        LoadError: this version of transformers does not have one of them.
    """
    warn_if_untested("transformers")
    try:
        return SimpleNamespace(
            **{
                name: getattr(import_module(f"transformers.{module}"), name)
                for module, names in CODE.items()
                for name in names
            }
        )
    except (ImportError, AttributeError) as error:
        raise LoadError(
            "the source has different names than the model, and the conversion of this "
            f"transformers version cannot be used ({error}). Install transformers "
            f"{TESTED['transformers']}, with which anyrank was tested, or pass rename=."
        ) from error


class _Converter:
    """The renamings and converters of transformers for one model, on symbolic tensors.

    Raises:
        LoadError: as for `conversion_code`.
    """

    def __init__(self, model: Any, live: set[str]) -> None:
        code = conversion_code()
        self.model = model
        self.live = dict.fromkeys(live, True)
        self.order, self.rename = code.dot_natural_key, code.rename_source_key
        # It looks up the classes of modules by name.
        mapping: list[Any] = code.get_model_conversion_mapping(plain_copy(model))
        self.renamings = [entry for entry in mapping if isinstance(entry, code.WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, code.WeightConverter)]

    def run(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors of a source with the model's names."""
        result: dict[str, StoredTensor] = {}
        groups: dict[str, tuple[Any, dict[str, list[Any]]]] = {}
        for key in sorted(tensors, key=self.order):
            name, pattern = self._renamed(key)
            if pattern is None or name not in self.live:
                if name in result:
                    raise LoadError(
                        f"{key}: is the second key of the source that becomes {name}; drop one of "
                        "them with rename="
                    )
                result[name if name in self.live else key] = tensors[key]
                continue
            converter = next(c for c in self.converters if pattern in c.source_patterns)
            _, collected = groups.setdefault(name, (deepcopy(converter), {}))
            collected.setdefault(pattern, []).append(SymbolicTensor(tensors[key]))
        for name, (converter, collected) in groups.items():
            result.update(self._fused(name, converter, collected))
        return result

    def means_tensor(self, key: str) -> bool:
        """Return whether a key becomes a tensor of the model or a part of one."""
        return self._renamed(key)[0] in self.live

    def _renamed(self, key: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        name, pattern = self.rename(key, self.renamings, self.converters, prefix, self.live)
        if name not in self.live:
            plain, _ = self.rename(key, [], [], prefix, self.live)
            if plain in self.live:
                return plain, None
        return name, pattern

    def _fused(
        self, name: str, converter: Any, collected: dict[str, list[Any]]
    ) -> dict[str, StoredTensor]:
        lost = [p for p in converter.source_patterns if p not in collected]
        counts = {len(parts) for parts in collected.values()}
        if len(converter.source_patterns) > 1 and (lost or len(counts) > 1):
            part_counts = {pattern: len(parts) for pattern, parts in collected.items()}
            raise LoadError(
                f"{name} is fused from {', '.join(converter.source_patterns)}, but the source has "
                f"{part_counts}. Find the missing key or file; or drop all of these keys with "
                f"rename={{key: ''}}, and pass missing='keep' or 'init'."
            )
        values: dict[str, Any] = dict(collected)
        for operation in converter.operations:
            try:
                values = operation.convert(
                    values,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=name,
                    model=self.model,
                    config=self.model.config,
                    missing_keys=None,
                )
            except Exception as error:  # code of transformers, which calls ours
                what = str(error) if isinstance(error, LoadError) else repr(error)
                raise LoadError(f"{name}: {type(operation).__name__}: {what}") from error
        full = name.replace("*.", "0.")
        head, _, tail = next(
            (full.partition(pattern) for pattern in values if pattern in full), ("", "", "")
        )
        fused: dict[str, StoredTensor] = {}
        for pattern, value in values.items():
            symbolic = value[0] if isinstance(value, list) else value
            fused[head + pattern + tail] = symbolic.stored
        return fused
