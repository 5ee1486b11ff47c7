"""Names: what wrappers add to them, how a file's keys find the model's tensors, and near misses."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from anyrank.errors import LoadError, WrongType

# Segments that only a wrapper puts into a name.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
PEFT_PREFIX = "base_model.model."
PEFT_SEGMENTS = frozenset({"base_layer", "original_module"})
_ADDED = re.compile("|".join((*WRAPPERS, *PEFT_SEGMENTS, r"^module\b", re.escape(PEFT_PREFIX))))
_OWN_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.(?!weight$)[^.]+")
_TRAINED_COPY = re.compile(r"\bmodules_to_save\.[^.]+\.")

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str] | None


def renamer(rename: Rename) -> Callable[[str], str]:
    """One function for the three forms of `rename=`: a dict of keys or prefixes, pairs of regex and
    replacement applied in order, or a callable.

    Raises:
        ValueError: a regex that does not compile, or an entry that is not a pair.
        TypeError: another type.
    """
    if rename is None:
        return lambda key: key
    if callable(rename):
        function = cast("Callable[[str], object]", rename)

        def by_function(key: str) -> str:
            try:
                name = function(key)
            except Exception as error:
                raise LoadError(
                    f"rename= failed for {key}: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(name, str):
                raise WrongType(f"rename= gave {name!r} for {key}: it must return a name, a str")
            return name

        return by_function
    if isinstance(rename, Mapping):
        mapping = dict(rename)
        wrong = [(old, new) for old, new in mapping.items() if not _are_texts(old, new)]
        if wrong:
            old, new = wrong[0]
            raise TypeError(f"rename= takes keys and names as text, not {old!r}: {new!r}")
        return lambda key: _by_mapping(key, mapping)
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]
        wrong = [replacement for _, replacement in pairs if not _are_texts(replacement)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is not text to put in place")
        for pattern, replacement in pairs:
            pattern.sub(replacement, "")  # raises for a group that the pattern has not
    except (re.error, TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"rename= takes a dict, pairs of (regex, replacement) or a callable: {error}"
        ) from error

    def by_pairs(key: str) -> str:
        for pattern, replacement in pairs:
            key = pattern.sub(replacement, key)
        return key

    return by_pairs


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _by_mapping(key: str, mapping: dict[str, str]) -> str:
    if key in mapping:
        return mapping[key]
    prefixes = [old for old in mapping if key.startswith(old if old.endswith(".") else f"{old}.")]
    if not prefixes:
        return key
    old = max(prefixes, key=len)
    return (mapping[old] + key[len(old) :]).lstrip(".")


def candidates(key: str) -> Iterator[str]:
    """Names that a file's key may mean, the literal one first."""
    yield key
    if not _ADDED.search(key):  # as of most keys: the rest would be the same
        return
    parts = key.split(".")
    plain = [part for part in parts if part not in WRAPPERS]
    if plain[:1] == ["module"]:
        yield ".".join(plain)
        plain = plain[1:]
    yield ".".join(plain)
    base = ".".join(plain).removeprefix(PEFT_PREFIX)
    yield ".".join(part for part in base.split(".") if part not in PEFT_SEGMENTS)


def is_of_adapter(key: str) -> bool:
    """Whether a key is one that PEFT saved, so that it is none of a model without PEFT."""
    return key.startswith((PEFT_PREFIX, f"module.{PEFT_PREFIX}"))


def is_own_factor(key: str) -> bool:
    """Whether a key is a factor as a model under PEFT names it: `up.lora_A.default.weight`."""
    return _OWN_FACTOR.search(key) is not None


def is_of_base_layer(key: str) -> bool:
    """Whether a key is of what an adapter is added to, in a model under PEFT."""
    return ".base_layer." in f".{key}"


def is_trained_copy(key: str) -> bool:
    """Whether a key is of a module's copy that PEFT trains whole, as `modules_to_save` asks for."""
    return _TRAINED_COPY.search(key) is not None


# Names under which training scripts keep the weights in a checkpoint of several parts.
NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
# Names under which they and training tools keep what is not weights; several are numbered.
OTHERS = frozenset(
    {
        *("optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states"),
        *("lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "rng_state"),
        *("rng", "rng_states", "scaler", "callbacks", "loops", "hyper_parameters"),
    }
)


def is_other_part(key: str) -> bool:
    """Whether a key of a checkpoint is of a part that is not weights, by the part's name."""
    return re.sub(r"_\d+$", "", key.partition(".")[0]) in OTHERS


# A tensor of the model as the matcher sees it: for each place that has it (several when it is tied)
# the names that mean the place, the best first.
TensorNames = tuple[tuple[str, ...], ...]


@dataclass
class TensorKeys:
    """Which key fills which tensor.

    Attributes:
        keys: index of the wanted tensor -> key in the file.
        missing: indices of wanted tensors without a key.
        unexpected: keys that fill nothing.
        duplicates: keys that a tied tensor did not need, with the key that filled it.
    """

    keys: dict[int, str] = field(default_factory=dict[int, str])
    missing: list[int] = field(default_factory=list[int])
    unexpected: list[str] = field(default_factory=list[str])
    duplicates: dict[str, str] = field(default_factory=dict[str, str])


def match_keys(
    wanted: Sequence[TensorNames], keys: Iterable[str], rename: Callable[[str], str]
) -> TensorKeys:
    """Give each wanted tensor its key.

    One key may fill several tensors that answer to the same name (a copy that an adapter keeps);
    a key of an adapter fills the adapter's copy alone, and before a key of the base does. A tied
    tensor takes the key of its first place that has a key.

    Raises:
        LoadError: two keys mean the same place.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for index, want in enumerate(wanted):
        for position, names in enumerate(want):
            for name in names:
                places.setdefault(name, []).append((index, position))
    filled: dict[tuple[int, int], str] = {}
    result = TensorKeys()
    renamed = {key: rename(key) for key in keys}
    adapters = {key: None for key, name in renamed.items() if is_of_adapter(name)}
    # A trained copy that a run saved by its own name takes that, and not its original's.
    trained = {key: None for key, name in renamed.items() if _TRAINED_COPY.search(name)}
    first = {**adapters, **trained}
    for key in (*first, *(key for key in renamed if key not in first)):
        hits = places.get(renamed[key])  # as most keys are names: 3 us faster than `candidates`
        if hits is None:
            hits = next((places[n] for n in candidates(renamed[key]) if n in places), None)
        if hits is None:
            result.unexpected.append(key)
            continue
        if key in adapters:
            copies = [hit for hit in hits if "original_module" not in wanted[hit[0]][hit[1]][0]]
            hits = copies or hits
        for hit in dict.fromkeys(hits):
            if hit in filled:
                known = filled[hit]
                is_copy = len(hits) > 1 and (known in adapters or known in trained)
                if is_copy and key not in adapters:
                    continue
                name = wanted[hit[0]][hit[1]][0]
                raise LoadError(f"both {filled[hit]} and {key} of the file mean {name}: rename one")
            filled[hit] = key
    for (index, _), key in sorted(filled.items()):
        used = result.keys.setdefault(index, key)
        if used != key:
            result.duplicates[key] = used
    direct = {index: key for index, key in result.keys.items() if key not in adapters}
    for index, want in enumerate(wanted):
        if index not in result.keys:
            key = _key_of_twin(index, want, places, direct)
            if key is None:
                result.missing.append(index)
            else:
                result.keys[index] = key
    return result


def _key_of_twin(
    index: int, want: TensorNames, places: dict[str, list[tuple[int, int]]], direct: dict[int, str]
) -> str | None:
    """The key of the tensor that a wanted one copies: an adapter's trainable copy, also of an
    adapter that is not active.
    """
    names = {name for names in want for name in names}
    names |= {_TRAINED_COPY.sub("", name) for name in names if "modules_to_save." in name}
    twins = {hit[0] for name in names for hit in places.get(name, ())} - {index}
    return next((direct[other] for other in sorted(twins) if other in direct), None)


NEIGHBOURS = 10  # on each side, forwards and backwards, that are compared letter by letter


class Near:
    """Hints at the most similar of many names; built once for all that is asked."""

    def __init__(self, names: Iterable[str]) -> None:
        self.forwards = sorted(names)
        self.backwards = sorted(name[::-1] for name in self.forwards)

    def hint(self, name: str) -> str:
        """A hint at the most similar name, or nothing."""
        likely = _neighbours(self.forwards, name)
        likely += [other[::-1] for other in _neighbours(self.backwards, name[::-1])]
        close = difflib.get_close_matches(name, likely, n=1, cutoff=0.75)
        return f" (near: {close[0]})" if close else ""


def near(name: str, others: Sequence[str]) -> str:
    """A hint at the most similar of a few names, or nothing."""
    return Near(others).hint(name)


def _neighbours(ordered: Sequence[str], name: str) -> list[str]:
    """Those of some names that begin most like another one."""
    position = bisect_left(ordered, name)
    return list(ordered[max(0, position - NEIGHBOURS) : position + NEIGHBOURS])


Shapes = Mapping[str, tuple[int, ...]]


def wrong_prefix(keys: Shapes, names: Shapes) -> list[tuple[str, str, int]]:
    """Changes of prefix that place most of the unused keys: the keys' prefix, the names' in its
    place, and how many keys it places. Several are alternatives; none where no change places at
    least half of the keys and most of the names below its prefix, each with its own shape.
    """
    prefixes: dict[str, str | None] = {}  # end of a name -> what precedes it, if only one
    for name in names:
        for before, end in _cuts(name):
            prefixes[end] = None if end in prefixes else before
    placed: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key in keys:
        pairs = ((before, end) for before, end in _cuts(key) if end in prefixes)
        old, end = next(pairs, ("", ""))  # the longest end
        new = prefixes.get(end)
        if new is not None and old != new:
            placed.setdefault((old, new), []).append((key, new + end))
    counts: dict[tuple[str, str], int] = {}
    for (old, new), pairs in placed.items():
        if len(pairs) < max(2, len(keys) // 2):
            continue
        below = sum(name.startswith(new) for name in names)
        if 2 * len(pairs) > below and all(keys[key] == names[name] for key, name in pairs):
            counts[old, new] = len(pairs)
    most = max(counts.values(), default=0)
    best = [pair for pair, count in counts.items() if count == most]
    return [(old, new, most) for old, new in best if new == best[0][1]]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """(before, end) at every dot, the longest end first; before keeps its last dot."""
    start = 0
    while True:
        yield name[:start], name[start:]
        dot = name.find(".", start)
        if dot < 0:
            return
        start = dot + 1
