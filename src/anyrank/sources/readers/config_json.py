"""Settings next to weights: the quantization in config.json, and an adapter's configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_whole

CONFIG, QUANTIZATION = "config.json", "quantization_config"
MAX_CONFIG_BYTES = 16 << 20


def read_config(storage: Storage, path: str) -> dict[str, Any]:
    """Read a settings file; return {} if it is missing or corrupt."""
    try:
        if storage.is_file(path):
            return config_in(read_whole(storage, path, MAX_CONFIG_BYTES))
    except (LoadError, OSError):
        pass  # not every store reports that a file is missing
    return {}


def config_in(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text; {} if it is not an object."""
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # the library that builds the model reports it
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def read_quantization(storage: Storage, path: str) -> dict[str, Any]:
    """Read the `quantization_config` of a config.json; return {} if it is missing."""
    config = read_config(storage, path)
    configs = [
        cast("dict[str, Any]", part).get(QUANTIZATION)
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
    ]
    return next((cast("dict[str, Any]", value) for value in configs if isinstance(value, dict)), {})


def with_quantization(listing: Listing, storage: Storage, path: str) -> Listing:
    """Add the quantization_config of the weights of a file or folder, unless they contain it.

    Args:
        listing: the weights. Weights in plain dtypes (an adapter, a projector) are not quantized.
        storage: their storage.
        path: the config.json next to them.
    """
    dtypes = [stored.dtype for stored in listing.tensors.values()]
    if listing.quantization or all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
        return listing
    return replace(listing, quantization=read_quantization(storage, path))
