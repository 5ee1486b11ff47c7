"""Sources with something wrong in them, for `traps.py`. Every one starts from the same small Llama.

A change takes the folder of the good checkpoint, spoils it, and returns the source to load.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

State = dict[str, Any]
Change = Callable[[Path], Path]
INDEX = "model.safetensors.index.json"
VICTIM = "model.layers.1.mlp.down_proj.weight"  # 32 x 64: not square


def reference(tied: bool = False) -> Any:
    """The model with its right values, the same in every process."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(7)
    return LlamaForCausalLM(config)


def write_folder(folder: Path, change: Change) -> Path:
    """The good checkpoint in two shards, then the change; the source to load."""
    inside = folder / "checkpoint"
    inside.mkdir(parents=True)
    write_shards(inside, state_of(reference()))
    return change(inside)


def state_of(model: Any) -> State:
    """Its state dict, ties left out as safetensors wants it."""
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def write_shards(folder: Path, state: State) -> None:
    """Two safetensors files, an index and the config."""
    names = sorted(state)
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {name: files[int(2 * n >= len(names))] for n, name in enumerate(names)}
    for file in files:
        part = {name: state[name].contiguous() for name in names if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(value.numel() * value.element_size() for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")


def file_of(folder: Path, name: str) -> Path:
    """The shard that holds a tensor."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return folder / index["weight_map"][name]


def span_of(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes are in its file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + start, 8 + length + stop


# -- changes --------------------------------------------------------------------------------------


def with_state(change: Callable[[State], State], is_tied: bool = False) -> Change:
    """The checkpoint of another state dict."""

    def spoil(folder: Path) -> Path:
        write_shards(folder, change(state_of(reference(is_tied))))
        return folder

    return spoil


def reshaped(change: Callable[[Any], Any]) -> Change:
    """One tensor has another shape."""
    return with_state(lambda state: state | {VICTIM: change(state[VICTIM])})


def no_shard(folder: Path) -> Path:
    """The index names a file that is not there."""
    file_of(folder, VICTIM).unlink()
    return folder


def leftover(folder: Path) -> Path:
    """An older save's file lies beside, with other values for the same keys."""
    old = {key: value + 1 for key, value in state_of(reference()).items()}
    for name in ("aaa-old.safetensors", "zzz-old.safetensors"):
        save_file(old, folder / name)
    return folder


def truncated(folder: Path) -> Path:
    """The copy of a shard broke off."""
    path = file_of(folder, VICTIM)
    os.truncate(path, path.stat().st_size * 2 // 3)
    return folder


def flip(path: Path, position: int) -> None:
    """Turn one bit over."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def bit(folder: Path) -> Path:
    """One bit of one weight."""
    path = file_of(folder, VICTIM)
    flip(path, span_of(path, VICTIM)[0] + 103)
    return folder


def bit_zip(folder: Path) -> Path:
    """One bit of a torch file, whose records have checksums."""
    state, path = state_of(reference()), folder / "model.pt"
    torch.save(state, path)
    flip(path, path.read_bytes().index(state[VICTIM].numpy().tobytes()[:64]) + 3)
    return path


def nan(folder: Path) -> Path:
    """One tensor is full of NaN."""
    path = file_of(folder, VICTIM)
    start, stop = span_of(path, VICTIM)
    data = bytearray(path.read_bytes())
    data[start:stop] = struct.pack("<f", float("nan")) * ((stop - start) // 4)
    path.write_bytes(data)
    return folder


def hub(change: Change) -> Change:
    """The folder lies in a Hugging Face cache, whose blobs bear their digests; then the change."""

    def spoil(folder: Path) -> Path:
        blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "main"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for path in folder.iterdir():
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.move(path, blob)
            os.symlink(blob, snapshot / path.name)
        return change(snapshot)

    return spoil


class RunsCode:
    """Unpickling it makes a file beside the checkpoint."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.marker, 0o777, True)


def pickled(folder: Path) -> Path:
    """A torch file with a pickle that runs code."""
    path = folder / "model.pt"
    torch.save({**state_of(reference()), "extra": RunsCode(folder / "ran-code")}, path)
    return path


def metadata(folder: Path) -> Path:
    """A DCP checkpoint whose metadata is a pickle that runs code."""
    inside = folder / "dcp"
    dcp.save(state_of(reference()), checkpoint_id=inside, no_dist=True)
    path = inside / ".metadata"
    known = pickle.loads(path.read_bytes())
    known.planner_data = {"extra": RunsCode(folder / "ran-code")}
    path.write_bytes(pickle.dumps(known))
    return inside


FILES: dict[str, Change] = {
    "good": with_state(lambda state: state),
    "tied": with_state(lambda state: state, is_tied=True),  # the head is the embedding
    "missing": with_state(lambda state: {key: state[key] for key in state if key != VICTIM}),
    "module": with_state(lambda state: {f"module.{key}": state[key] for key in state}),
    "no_shard": no_shard,
    "leftover": leftover,
    "truncated": truncated,
    "half": reshaped(lambda value: value[: len(value) // 2].clone()),
    "transposed": reshaped(lambda value: value.t().contiguous()),
    "more": reshaped(lambda value: value.repeat(2, 1)),
    "bit": bit,
    "bit_hub": hub(bit),
    "bit_zip": bit_zip,
    "nan": nan,
    "nan_hub": hub(nan),
    "pickle": pickled,
    "metadata": metadata,
}
