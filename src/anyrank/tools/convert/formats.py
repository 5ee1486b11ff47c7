"""The formats that `convert` writes: one row for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anyrank.tools.convert.output import Contents, Output
from anyrank.tools.convert.planned_files import plan_dcp, plan_safetensors, plan_torch


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """A format that `convert` writes.

    Attributes:
        plan: plans the files, byte by byte; raises LoadError if the format cannot hold a tensor.
        has_folder: whether the output is a folder, unless the destination's ending is that of a
            file of this format.
        has_shards: whether `shard_bytes=` limits the files of such a folder.
        has_configuration: whether the configuration and the tokenizer go into such a folder.
        keeps_adapters: whether readers of the output find adapters that are not merged.
    """

    plan: Callable[[Contents], Output]
    has_folder: bool
    has_shards: bool
    has_configuration: bool
    keeps_adapters: bool


OUTPUTS = {
    "safetensors": OutputFormat(
        plan=plan_safetensors,
        has_folder=True,
        has_shards=True,
        has_configuration=True,
        keeps_adapters=False,
    ),
    "dcp": OutputFormat(
        plan=plan_dcp,
        has_folder=True,
        has_shards=False,
        has_configuration=False,
        keeps_adapters=True,
    ),
    "torch": OutputFormat(
        plan=plan_torch,
        has_folder=False,
        has_shards=False,
        has_configuration=False,
        keeps_adapters=True,
    ),
}
