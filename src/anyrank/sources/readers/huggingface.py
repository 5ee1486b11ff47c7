"""Hugging Face folders: an index and its shards, or one file; duplicates are skipped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NamedTuple

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, inside, join_path, read_whole
from anyrank.sources.endings import ENDINGS, FILES, META_PART, OF_META, OF_RANK, RANK_PART
from anyrank.sources.readers.config_json import CONFIG, read_config, read_quantization
from anyrank.sources.readers.joining import join
from anyrank.sources.weight_files import list_file
from anyrank.wording import count

ADAPTERS = ("adapter_model", "adapter")
MODELS = ("model", "diffusion_pytorch_model", "pytorch_model")
STEMS = (*MODELS, *ADAPTERS)
SUBFOLDERS, SHOWN = 50, 3  # how many are searched, and how many are named
# The ending may name a variant, such as `.fp16.safetensors`.
SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<ending>(\.\w+)?\.[a-z]+)$")
MAX_INDEX_BYTES = 1 << 30


def list_folder(storage: Storage, folder: str) -> Listing:
    """List the weights of a folder: an index with its shards if it has one, else a single file.

    Raises:
        LoadError: the folder has no weights, shards or keys of the index are missing, or the choice
            is ambiguous.
    """
    names = [name for name in storage.names(folder) if not name.startswith(".")]
    listing = _chosen(storage, folder, names)
    adapter = read_config(storage, join_path(folder, "adapter_config.json"))
    return replace(
        listing,
        quantization=read_quantization(storage, join_path(folder, CONFIG)) or listing.quantization,
        adapters=dict.fromkeys(range(len(listing.files)), adapter) if adapter else {},
    )


def _chosen(storage: Storage, folder: str, names: list[str]) -> Listing:
    # Mistral's releases have a whole model in this file, often next to the same model in shards.
    whole = next((name for name in names if name == "consolidated.safetensors"), None)
    choices = (_choose(storage, folder, names, ending) for ending in FILES)
    chosen = next(filter(None, choices), whole)
    if chosen is not None:
        _check_one_kind(folder, names)
        others = {
            name: f"{chosen} was chosen"
            for name in names
            if name.endswith(tuple(FILES)) and name != chosen
        }
        if chosen.endswith(".json"):
            return _indexed(storage, folder, chosen, names, others)
        shards = _shards_of(folder, chosen, names)
        listings = [list_file(storage, join_path(folder, name)) for name in shards]
        skipped = {name: why for name, why in others.items() if name not in shards}
        return join(_name(listings), listings, skipped)
    shown = ", ".join(names[:20]) or "nothing"
    parts = [name for name in names if META_PART.match(name)]
    if parts:
        raise LoadError(f"{folder}: {parts[0]} is {OF_META}")
    below = _weights_below(storage, folder)
    hint = f"; weights are in {', '.join(below)}; pass that folder" if below else ""
    raise LoadError(f"{folder}: contains no weights{hint}. The folder contains {shown}.")


def _check_one_kind(folder: str, names: list[str]) -> None:
    """Check that a folder does not hold both a model and an adapter.

    transformers would read both, and without its adapter the model differs from the trained one.

    Raises:
        LoadError: it holds both; the error names a file of each.
    """
    stems = {
        name.partition(".")[0].split("-")[0]: name for name in names if name.endswith(tuple(FILES))
    }
    models = [stems[stem] for stem in (*MODELS, "consolidated") if stem in stems]
    adapters = [stems[stem] for stem in ADAPTERS if stem in stems]
    if models and adapters:
        raise LoadError(
            f"{folder}: contains both a model ({models[0]}) and an adapter ({adapters[0]}). Pass "
            "the files of one of them, or, for a model under PEFT, a list with the files of both."
        )


def _weights_below(storage: Storage, folder: str, depth: int = 2) -> list[str]:
    """Return a few of the folders below this one that hold files of weights, by names only."""
    holders: list[str] = []
    inner = [n for n, is_folder in storage.entries(folder).items() if is_folder and n[0] != "."]
    for name in sorted(inner)[:SUBFOLDERS]:
        path = join_path(folder, name)
        if any(entry.endswith((*ENDINGS, ".distcp")) for entry in storage.names(path)):
            holders.append(name)
        elif depth > 1:
            holders += [f"{name}/{deeper}" for deeper in _weights_below(storage, path, depth - 1)]
    return holders[:SHOWN]


def _name(listings: list[Listing]) -> str:
    return (
        listings[0].format if len(listings) == 1 else f"{listings[0].format}, {len(listings)} files"
    )


def _choose(storage: Storage, folder: str, names: list[str], ending: str) -> str | None:
    """Return the index, the first shard or the only file of the set of weights with this ending.

    Raises:
        LoadError: there are several sets.
    """
    sets = _sets_of(names, ending)
    indexes = [entry for entry in sets if entry.first.endswith(".json")]
    stems = [*STEMS, *(entry.stem for entry in indexes if len(indexes) == 1)]
    stem = next((stem for stem in stems if any(entry.stem == stem for entry in sets)), None)
    if stem is not None:
        sets = [entry for entry in sets if entry.stem == stem]
    parts = [entry.first for entry in sets if RANK_PART.match(entry.first)]
    if len(parts) > 1:
        raise LoadError(f"{folder}: {parts[0]} is {OF_RANK}")
    if len(sets) > 1 and not _is_index_of(storage, folder, sets):
        shown = ", ".join(entry.label for entry in sets)
        raise LoadError(
            f"{folder}: contains several sets of weights ({shown}); pass a file, or a list of files"
        )
    return sets[0].first if sets else None


class _Set(NamedTuple):
    """A set of files with the weights of one model.

    Attributes:
        stem: the start of the files' names.
        first: the index, the first shard, or the only file.
        label: its name in messages.
    """

    stem: str
    first: str
    label: str


def _sets_of(names: list[str], ending: str) -> list[_Set]:
    """Return the sets of weights with this ending, by name; an index takes precedence."""
    tail = f"{ending}.index.json"
    sets = {
        name: _Set(name.removesuffix(tail), name, name) for name in names if name.endswith(tail)
    }
    indexed = {entry.stem for entry in sets.values()}
    for name in names:
        if not name.endswith(ending) or name.startswith(("consolidated", "training_args")):
            continue
        match = SHARD.match(name)
        if match is None:
            sets[name] = _Set(name.removesuffix(ending), name, name)
        elif match["stem"] not in indexed:
            label = f"{match['stem']}-*-of-{match['count']}{match['ending']}"
            sets.setdefault(label, _Set(match["stem"], name, label))
    return [*sets.values()]


def _is_index_of(storage: Storage, folder: str, sets: list[_Set]) -> bool:
    """Return whether the first set is an index, and the other sets are files that it names."""
    index, *others = (entry.first for entry in sets)
    if not index.endswith(".json"):
        return False
    return {*others} <= {*_weight_map(storage, join_path(folder, index)).values()}


def _shards_of(folder: str, name: str, names: list[str]) -> list[str]:
    match = SHARD.match(name)
    if match is None:
        return [name]
    count, width = int(match["count"]), len(match["number"])
    # Most writers count from 1, some from 0.
    first = (
        0 if f"{match['stem']}-{0:0{width}d}-of-{match['count']}{match['ending']}" in names else 1
    )
    shards = [
        f"{match['stem']}-{number:0{width}d}-of-{match['count']}{match['ending']}"
        for number in range(first, first + count)
    ]
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise LoadError(
            f"{folder}: {len(missing)} of {count} shards are missing, such as {missing[0]}. Copy "
            "or download the folder again."
        )
    return shards


def _indexed(
    storage: Storage, folder: str, index: str, names: list[str], others: dict[str, str]
) -> Listing:
    path = join_path(folder, index)
    weight_map = _weight_map(storage, path)
    shards = sorted(set(weight_map.values()))
    for shard in shards:  # before any is opened, because the first one may be corrupt
        if "/" not in shard and shard not in names:
            raise _missing(path, shard, weight_map)
    listings: list[Listing] = []
    for shard in shards:
        try:
            listing = list_file(storage, inside(folder, shard))
        except FileNotFoundError as error:
            raise _missing(path, shard, weight_map) from error
        tensors = {k: t for k, t in listing.tensors.items() if weight_map.get(k, shard) == shard}
        lost = [k for k, name in weight_map.items() if name == shard and k not in tensors]
        if lost:
            raise LoadError(f"{path}: lists {lost[0]} in {shard}, which does not contain it")
        listings.append(listing.with_tensors(tensors))
    skipped = {name: why for name, why in others.items() if name not in shards}
    return join(_name(listings), listings, skipped)


def _missing(path: str, shard: str, weight_map: dict[str, str]) -> LoadError:
    keys = [key for key, name in weight_map.items() if name == shard]
    return LoadError(
        f"{path}: names {shard} with {count(len(keys), 'tensor')} ({keys[0]}, ...), but the file "
        "is missing. The download is incomplete; download the folder again."
    )


def _weight_map(storage: Storage, path: str) -> dict[str, str]:
    try:
        index = json.loads(read_whole(storage, path, MAX_INDEX_BYTES))
        weight_map = index["weight_map"]
        whole = all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: is not an index with a weight_map ({error})") from error
    if not whole or not weight_map:
        raise LoadError(f"{path}: its weight_map is empty, or does not map keys to file names")
    return weight_map
