"""Your PyTorch training state, on any rank, on any number of ranks.

The names in `__all__` are the whole public interface. Each is imported on first use, so
`import anyrank` costs nothing, and a command that needs no tensors never loads torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyrank import integrations as integrations
    from anyrank.errors import (
        AnyrankError,
        CheckpointError,
        CorruptCheckpoint,
        LoadError,
        RankError,
        RecomputeError,
        UnsafeFile,
    )
    from anyrank.live.report import SyncReport
    from anyrank.live.sync import Sync, sync
    from anyrank.loading.load import load
    from anyrank.loading.materialize import materialize
    from anyrank.loading.meta import meta
    from anyrank.loading.plan import LoadPlan, plan
    from anyrank.loading.report import LoadReport
    from anyrank.memory.loss import tiled_loss
    from anyrank.memory.offload import Offload, OffloadStats
    from anyrank.memory.patch import recompute_, tile_
    from anyrank.memory.recompute import recompute
    from anyrank.memory.tile import tile
    from anyrank.models.dialects.frozen.cpu_only import cpu_only
    from anyrank.models.dialects.frozen.freeze import freeze
    from anyrank.runs.resume.checkpoints import Checkpoints
    from anyrank.runs.state.resume_report import ResumeReport
    from anyrank.runs.state.train_state import TrainState
    from anyrank.tools.convert.convert import convert
    from anyrank.tools.inspect.diff import diff
    from anyrank.tools.inspect.inspect import inspect
    from anyrank.tools.inspect.verify import verify
    from anyrank.training.steps.loader import ElasticLoader
    from anyrank.training.streams.lane_transform import CUT
    from anyrank.training.streams.row_counts import row_counts
    from anyrank.training.streams.transforms import Buckets, Pack
    from anyrank.versions import __version__
    from anyrank.watching.check import check
    from anyrank.watching.hang import watch
    from anyrank.world.group import ALONE

__all__ = [
    "ALONE",
    "CUT",
    "AnyrankError",
    "Buckets",
    "CheckpointError",
    "Checkpoints",
    "CorruptCheckpoint",
    "ElasticLoader",
    "LoadError",
    "LoadPlan",
    "LoadReport",
    "Offload",
    "OffloadStats",
    "Pack",
    "RankError",
    "RecomputeError",
    "ResumeReport",
    "Sync",
    "SyncReport",
    "TrainState",
    "UnsafeFile",
    "__version__",
    "check",
    "convert",
    "cpu_only",
    "diff",
    "freeze",
    "inspect",
    "load",
    "materialize",
    "meta",
    "plan",
    "recompute",
    "recompute_",
    "row_counts",
    "sync",
    "tile",
    "tile_",
    "tiled_loss",
    "verify",
    "watch",
]

# Public name -> the module that defines it. No module in this package may have a public name:
# importing it would set the module as an attribute here, in place of the function.
HOMES = {
    "ALONE": "anyrank.world.group",
    "AnyrankError": "anyrank.errors",
    "Buckets": "anyrank.training.streams.transforms",
    "CUT": "anyrank.training.streams.lane_transform",
    "CheckpointError": "anyrank.errors",
    "Checkpoints": "anyrank.runs.resume.checkpoints",
    "CorruptCheckpoint": "anyrank.errors",
    "ElasticLoader": "anyrank.training.steps.loader",
    "LoadError": "anyrank.errors",
    "LoadPlan": "anyrank.loading.plan",
    "LoadReport": "anyrank.loading.report",
    "Offload": "anyrank.memory.offload",
    "OffloadStats": "anyrank.memory.offload",
    "Pack": "anyrank.training.streams.transforms",
    "RankError": "anyrank.errors",
    "RecomputeError": "anyrank.errors",
    "ResumeReport": "anyrank.runs.state.resume_report",
    "Sync": "anyrank.live.sync",
    "SyncReport": "anyrank.live.report",
    "TrainState": "anyrank.runs.state.train_state",
    "UnsafeFile": "anyrank.errors",
    "check": "anyrank.watching.check",
    "convert": "anyrank.tools.convert.convert",
    "diff": "anyrank.tools.inspect.diff",
    "freeze": "anyrank.models.dialects.frozen.freeze",
    "inspect": "anyrank.tools.inspect.inspect",
    "load": "anyrank.loading.load",
    "materialize": "anyrank.loading.materialize",
    "meta": "anyrank.loading.meta",
    "plan": "anyrank.loading.plan",
    "recompute": "anyrank.memory.recompute",
    "recompute_": "anyrank.memory.patch",
    "row_counts": "anyrank.training.streams.row_counts",
    "cpu_only": "anyrank.models.dialects.frozen.cpu_only",
    "sync": "anyrank.live.sync",
    "tile": "anyrank.memory.tile",
    "tile_": "anyrank.memory.patch",
    "tiled_loss": "anyrank.memory.loss",
    "verify": "anyrank.tools.inspect.verify",
    "__version__": "anyrank.versions",
    "watch": "anyrank.watching.hang",
}

# Hidden from type checkers, which read the imports above: for them a misspelled name is an error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module that defines a public name, and keep its value here."""
        if name == "integrations":  # importing a package sets it as an attribute here
            return import_module("anyrank.integrations")
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(HOMES[name]), name)
        globals()[name] = value
        if "torch" in sys.modules:
            versions = import_module("anyrank.versions")
            versions.warn_of_untested_torch(str(sys.modules["torch"].__version__))
        return value


def __dir__() -> list[str]:
    """Return only the public names."""
    return list(__all__)
