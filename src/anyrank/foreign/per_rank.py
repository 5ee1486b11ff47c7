"""Folders with files of each rank: torch_checkpointing's (torchtitan), and verl's FSDP checkpoints.

Each file is what `torch.save` made of a rank's state dict, with its shares as DTensors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.storage import Storage, inside
from anyrank.foreign.checkpoint import Collector, ForeignCheckpoint, Unread
from anyrank.foreign.shards import merged
from anyrank.foreign.tables import of_table
from anyrank.formats import pickles

ITEM = re.compile(r"^(\w+?)_(\d+)\.pt$")
METADATA = "metadata.pkl"
VERL = re.compile(r"^(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt$")
STEP = re.compile(r"global_step_?(\d+)")


def read_torch_checkpointing(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What a folder of torch_checkpointing holds.

    Raises:
        LoadError: a rank's file is missing, or the shares do not make up a tensor.
        UnsafeFile: a file is damaged, or its pickle would run code.
    """
    files = Collector(storage, folder)
    names = storage.names(folder)
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if match := ITEM.match(name):
            found.setdefault(match[1], {})[int(match[2])] = name
    world = max(max(ranks) for ranks in found.values()) + 1
    if METADATA in names:
        world = max(world, _described(files, found))
    table: dict[Any, Any] = {}
    for item, by_rank in found.items():
        if item == "dataloader":
            table[item] = Unread("loader")
            continue
        by_all = len(by_rank) > 1 or item == "model"
        wanted = [by_rank.get(rank, f"{item}_{rank}.pt") for rank in range(world)]
        table[item] = _merged(files, wanted if by_all else [*by_rank.values()])
    made = of_table(files, table, folder)
    return replace(made, tool="torch_checkpointing", ranks=world)


def _merged(files: Collector, names: list[str]) -> Any:
    """What the files of all ranks hold together.

    Raises:
        LoadError: one is missing.
    """
    lost = [name for name in names if not files.storage.is_file(files.named(name))]
    if lost:
        raise LoadError(
            f"{files.folder}: {lost[0]} is missing ({len(lost)} of {len(names)} ranks' files): "
            "copy them all"
        )
    return merged([files.tree(files.named(name)) for name in names], files.folder)


def _described(files: Collector, found: dict[str, dict[int, str]]) -> int:
    """Ranks that saved, by the metadata; the files that it names are added to those found."""
    path = files.named(METADATA)
    table: Any = pickles.loads(files.small(path), path)
    try:
        for item, about in table["metadata"].items():
            for rank, layout in about["rank_to_layout_info"].items():
                if layout is not None:
                    kind = layout["serialization_format"]["type"]
                    if kind != "TorchSerialization":
                        raise LoadError(f"{path}: {item} is saved with {kind}, which is not read")
                    name = str(layout["file_path"])
                    inside(files.folder, name)
                    found.setdefault(str(item), {})[int(rank)] = name
        return int(table["world_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsafeFile(f"{path}: not the metadata of torch_checkpointing ({error!r})") from error


def read_verl(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What a folder of verl's FSDP workers holds.

    Raises:
        LoadError, UnsafeFile: as `read_torch_checkpointing`.
    """
    files = Collector(storage, folder)
    matches = [match for name in storage.names(folder) if (match := VERL.match(name))]
    worlds = {int(match[2]) for match in matches}
    if len(worlds) > 1:
        sizes = ", ".join(map(str, sorted(worlds)))
        raise LoadError(f"{folder}: holds files of saves on {sizes} ranks: keep those of one")
    world = worlds.pop()
    table: dict[Any, Any] = {}
    for kind in dict.fromkeys(match[1] for match in matches):
        several = range(1 if kind == "extra_state" else world)
        tree = _merged(files, [f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in several])
        table |= tree if kind == "extra_state" and isinstance(tree, dict) else {kind: tree}
    made = of_table(files, table, folder)
    step = STEP.search(folder)
    return replace(made, tool="verl", ranks=world, step=int(step[1]) if step else made.step)
