"""The record that `anyrank.freeze` stores on a module that is not trained.

Every wing reads the record; `models/dialects/frozen` acts on it.
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
        source: path or paths with its weights, as for `load`; None if the parent's checkpoints have
            them.
        tensors: name -> dtype, shape and xxh3-128 of its bytes, for parameters and persistent
            buffers; None as long as some are on meta or sharded, or are of a class that hides its
            bytes (quantized ones), which a load and a save refuse.
        versions: name -> identity and version of the tensor that was hashed.
    """

    source: FrozenSource | None = None
    tensors: Mapping[str, str] | None = None
    versions: Mapping[str, tuple[int, int]] = field(
        default_factory=dict[str, tuple[int, int]], compare=False
    )

    @property
    def digest(self) -> str | None:
        """Return one hash of all names, dtypes, shapes and bytes; None if `tensors` is None."""
        import xxhash  # only verification needs it

        if self.tensors is None:
            return None
        return xxhash.xxh3_128(repr(sorted(self.tensors.items())).encode()).hexdigest()


def frozen_info(module: nn.Module) -> FrozenInfo | None:
    """Return the record of a part; None unless `freeze` was called on exactly this module."""
    return module.__dict__.get(FROZEN)


def frozen_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of all frozen parts, including nested ones and the model."""
    return [(name, part) for name, part in walk(model) if frozen_info(part)]


def frozen_sources(model: nn.Module) -> list[FrozenSource]:
    """Return the sources of the frozen parts of a model, each once."""
    infos: list[FrozenInfo] = [part.__dict__[FROZEN] for _, part in frozen_parts(model)]
    return list(dict.fromkeys(info.source for info in infos if info.source is not None))
