"""Recognizes DTensors and FSDP modules without importing their classes.

Their packages take 0.6 s to import, and sympy comes with them. No object can be of a class whose
package has not been imported, so a process that shards nothing never pays for them. No module of
anyrank imports them at its own import; a test checks that.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor."""
    kind = _class_of("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(value, kind)


def is_fsdp2(module: object) -> TypeIs[FSDPModule]:
    """Return whether `fully_shard` was called on this module."""
    kind = fsdp2_class()
    return kind is not None and isinstance(module, kind)


def fsdp2_class() -> type[FSDPModule] | None:
    """Return the class that `fully_shard` adds to a module's bases; None if it is not imported."""
    return _class_of("torch.distributed.fsdp", "FSDPModule")


def is_fsdp1(module: object) -> TypeIs[FullyShardedDataParallel]:
    """Return whether a module is FSDP1's wrapper."""
    kind = _class_of("torch.distributed.fsdp", "FullyShardedDataParallel")
    return kind is not None and isinstance(module, kind)


def _class_of(package: str, name: str) -> Any:
    """Return a class of an imported package; a package that is being imported may still lack it."""
    return getattr(sys.modules.get(package), name, None)
