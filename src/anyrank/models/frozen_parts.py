"""The mark of a part of a model that is not trained: `anyrank.freeze` leaves it on the module.

Every wing reads the mark. `models/dialects/frozen` explains its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from anyrank.tensors.walk import walk

FrozenSource = str | tuple[str, ...]  # a path or several, as plain text
FROZEN = "anyrank_frozen"  # attribute of a frozen part: its FrozenInfo


@dataclass(frozen=True)
class FrozenInfo:
    """The record of a frozen part.

    Attributes:
        source: path or paths that hold its weights, as for `load`; None if the parent's checkpoints
            hold them.
        tensors: name -> dtype, shape and xxh3-128 of its bytes, for parameters and persistent
            buffers; None while some are on meta or sharded.
        versions: name -> identity and version of the tensor that was hashed.
    """

    source: FrozenSource | None = None
    tensors: Mapping[str, str] | None = None
    versions: Mapping[str, tuple[int, int]] = field(
        default_factory=dict[str, tuple[int, int]], compare=False
    )

    @property
    def digest(self) -> str | None:
        """One hash of all names, dtypes, shapes and bytes; None if `tensors` is."""
        import xxhash  # only verification needs it

        if self.tensors is None:
            return None
        return xxhash.xxh3_128(repr(sorted(self.tensors.items())).encode()).hexdigest()


def frozen_info(module: nn.Module) -> FrozenInfo | None:
    """The record of a part; None unless `freeze` was called on this very module."""
    return module.__dict__.get(FROZEN)


def frozen_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every frozen part, including nested ones and the model itself."""
    return [(name, part) for name, part in walk(model) if frozen_info(part)]


def frozen_sources(model: nn.Module) -> list[FrozenSource]:
    """The sources of the frozen parts of a model, each once."""
    infos: list[FrozenInfo] = [part.__dict__[FROZEN] for _, part in frozen_parts(model)]
    return list(dict.fromkeys(info.source for info in infos if info.source is not None))
