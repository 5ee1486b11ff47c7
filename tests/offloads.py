"""An `Offload` that moves CPU tensors too: real copies, without a device."""

from __future__ import annotations

from typing import Any

import anyrank
from anyrank.memory.offload import get_engine


def offload_of_cpu(pool_bytes: int, **options: Any) -> anyrank.Offload:
    offload = anyrank.Offload(pool_bytes, **{"min_bytes": 1, **options})
    get_engine(offload).moves_cpu = True
    return offload
