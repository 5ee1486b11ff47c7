"""Names: what wrappers add to them, and how a source's keys are matched with a model's tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anyrank.errors import LoadError

# Name segments that only a wrapper adds.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
AVERAGED = "n_averaged"  # the step counter of torch's AveragedModel, not a weight
PEFT_PREFIX = "base_model.model."
PEFT_SEGMENTS = frozenset({"base_layer", "original_module"})
_ADDED = re.compile("|".join((*WRAPPERS, *PEFT_SEGMENTS, r"^module\b", re.escape(PEFT_PREFIX))))
_OWN_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.(?!weight$)[^.]+")
_TRAINED_COPY = re.compile(r"\bmodules_to_save\.[^.]+\.")

# The types that `rename=` accepts; see `renamer` of sources/tables/renaming.py.
Renaming = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]
Rename = Renaming | None


def candidates(key: str) -> Iterator[str]:
    """Yield the names that a key may stand for, the literal one first."""
    yield key
    if not _ADDED.search(key):  # as for most keys: the rest would give the same name
        return
    parts = key.split(".")
    plain = [part for part in parts if part not in WRAPPERS]
    while plain[:1] == ["module"]:  # one wrapper around another: DDP, AveragedModel
        yield ".".join(plain)
        plain = plain[1:]
    yield ".".join(plain)
    base = ".".join(plain).removeprefix(PEFT_PREFIX)
    yield ".".join(part for part in base.split(".") if part not in PEFT_SEGMENTS)


def plain_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return names without what torch's wrappers add, by key. convert and diff use them.

    "module." is removed if all names start with it, next to the counter of an AveragedModel, whose
    key is left out.
    """
    plain = {
        key: ".".join(part for part in name.split(".") if part not in WRAPPERS)
        for key, name in names.items()
    }
    wrapped = {key: name for key, name in plain.items() if name != AVERAGED}
    if not wrapped or not all(name.startswith("module.") for name in wrapped.values()):
        return plain
    return {key: name.removeprefix("module.") for key, name in wrapped.items()}


def is_of_adapter(key: str) -> bool:
    """Return whether a key was saved by PEFT, so that models without PEFT do not have it."""
    return key.startswith((PEFT_PREFIX, f"module.{PEFT_PREFIX}"))


def is_own_factor(key: str) -> bool:
    """Return whether a key has the name of a factor in a PEFT model: `up.lora_A.default.weight`."""
    return _OWN_FACTOR.search(key) is not None


def is_of_base_layer(key: str) -> bool:
    """Return whether a key belongs to a layer of a PEFT model to which an adapter is added."""
    return ".base_layer." in f".{key}"


def is_trained_copy(key: str) -> bool:
    """Return whether a key is in the copy of a module that PEFT trains (`modules_to_save`)."""
    return "modules_to_save" in key and _TRAINED_COPY.search(key) is not None


# A tensor of the model as the matcher sees it: for each place in the model that has it (several if
# it is tied), the names of the place, the best first.
TensorNames = tuple[tuple[str, ...], ...]


@dataclass
class TensorKeys:
    """Which key fills which tensor.

    Attributes:
        keys: index of the tensor -> key in the source.
        missing: indices of tensors without a key.
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
    """Find the key of each tensor.

    One key may fill several tensors that have the same name (such as a copy that an adapter keeps).
    An adapter's key fills only the adapter's copy, and takes precedence over a key of the base. A
    tied tensor takes the key of its first place that has a key.

    Raises:
        LoadError: two keys stand for the same place.
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
    # A trained copy that a run saved under its own name takes that name, not its original's.
    trained = {key: None for key, name in renamed.items() if _TRAINED_COPY.search(name)}
    first = {**adapters, **trained}
    for key in (*first, *(key for key in renamed if key not in first)):
        hits = places.get(renamed[key])  # most keys are names; 3 us faster than `candidates`
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
                # PEFT saves a copy's bias under both of the copy's names if it saves all biases.
                if key in adapters and _short(renamed[key]) == _short(renamed[known]):
                    result.duplicates[key] = known
                    continue
                name = wanted[hit[0]][hit[1]][0]
                raise LoadError(
                    f"{filled[hit]} and {key} of the source both mean {name}; rename one of them"
                )
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


def _short(name: str) -> str:
    """Return the shorter one of the two names that PEFT saves a trained copy under."""
    return name.replace(".modules_to_save.", ".")


def _key_of_twin(
    index: int, want: TensorNames, places: dict[str, list[tuple[int, int]]], direct: dict[int, str]
) -> str | None:
    """Return the key of the tensor of which a tensor is an adapter's trainable copy.

    The adapter need not be active.
    """
    names = {name for names in want for name in names}
    names |= {_TRAINED_COPY.sub("", name) for name in names if "modules_to_save." in name}
    twins = {hit[0] for name in names for hit in places.get(name, ())} - {index}
    return next((direct[other] for other in sorted(twins) if other in direct), None)
