"""Files next to the weights in a Hugging Face folder: configuration, tokenizer, code, license."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import join_path, read_whole, storage_for
from anyrank.sources.endings import ENDINGS
from anyrank.sources.source import Source
from anyrank.tensors.spec import dtype_name

KINDS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab", ".bpe", ".py", ".md")
MAX_BYTES = 64 << 20  # per file
NO_COPY = ("trainer_state.json", "anyrank.json", "tensors.json")
DTYPE_KEYS = ("dtype", "torch_dtype")


def companions(source: Source, listing: Listing, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Read the files to copy from the folder of a source; none for sources of other formats.

    Args:
        source: as the caller passed it.
        listing: its contents.
        dtype: dtype of the converted, unquantized weights, for config.json; None to change nothing.

    Raises:
        LoadError: a file cannot be read.
    """
    folder = _folder_of(source, listing)
    if folder is None:
        return {}
    storage = storage_for(folder)
    files: dict[str, bytes] = {}
    for name in storage.names(folder):
        wanted = name.lower().endswith(KINDS) or name.upper().startswith("LICENSE")
        weights = name.lower().endswith(ENDINGS)
        path = join_path(folder, name)
        if name.startswith(".") or not wanted or weights or name in NO_COPY:
            continue
        try:
            info = storage.find(path)
            if info is None or info.size > MAX_BYTES:
                continue
            data = read_whole(storage, path)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error}") from error
        files[name] = _with_dtype(data, dtype) if name == "config.json" else data
    return files


def _folder_of(source: Source, listing: Listing) -> str | None:
    if not isinstance(source, (str, os.PathLike)) or not listing.has_companions:
        return None
    path = os.fspath(source)
    return path if storage_for(path).is_dir(path) else None


def _with_dtype(data: bytes, dtype: torch.dtype | None) -> bytes:
    """Change the dtype in a configuration, if it has one."""
    if dtype is None:
        return data
    try:
        config: Any = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(config, dict):
        return data
    _rename_dtype(config, dtype_name(dtype))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    return (json.dumps(config, indent=2) + "\n").encode()


def _rename_dtype(config: dict[str, Any], name: str) -> None:
    for key, value in config.items():
        if key in DTYPE_KEYS and isinstance(value, str):
            config[key] = name
        elif isinstance(value, dict):
            _rename_dtype(value, name)  # such as text_config
