"""Your PyTorch training state, on any rank, on any number of ranks.

The names in `__all__` are the whole public interface. Each is imported when it is first used, so
that `import anyrank` costs nothing and a command that needs no tensors never loads torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyrank import integrations as integrations
    from anyrank.around.conversion.convert import convert
    from anyrank.around.first_values.materialize import materialize
    from anyrank.around.frozen.cpu_only import cpu_only
    from anyrank.around.frozen.freeze import freeze
    from anyrank.around.inspection.diff import diff
    from anyrank.around.inspection.inspect import inspect
    from anyrank.around.inspection.verify import verify
    from anyrank.around.streams.lanes import CUT
    from anyrank.around.streams.row_counts import row_counts
    from anyrank.around.streams.transforms import Buckets, Pack
    from anyrank.around.sync.report import SyncReport
    from anyrank.around.sync.sync import Sync, sync
    from anyrank.errors import (
        AnyrankError,
        CheckpointError,
        CorruptCheckpoint,
        LoadError,
        RankError,
        RecomputeError,
        UnsafeFile,
    )
    from anyrank.filling.load import load
    from anyrank.filling.meta import meta
    from anyrank.filling.plan import LoadPlan, plan
    from anyrank.filling.report import LoadReport
    from anyrank.memory.loss import tiled_loss
    from anyrank.memory.offload import Offload, OffloadStats
    from anyrank.memory.patch import recompute_, tile_
    from anyrank.memory.recompute import recompute
    from anyrank.memory.tile import tile
    from anyrank.resume.checkpoints import Checkpoints
    from anyrank.state.resume_report import ResumeReport
    from anyrank.state.train_state import TrainState
    from anyrank.steps.loader import ElasticLoader
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

# Public name -> the module that defines it. No module beside this one may bear a public name:
# importing it would set it as an attribute here, in place of the function.
HOMES = {
    "ALONE": "anyrank.world.group",
    "AnyrankError": "anyrank.errors",
    "Buckets": "anyrank.around.streams.transforms",
    "CUT": "anyrank.around.streams.lanes",
    "CheckpointError": "anyrank.errors",
    "Checkpoints": "anyrank.resume.checkpoints",
    "CorruptCheckpoint": "anyrank.errors",
    "ElasticLoader": "anyrank.steps.loader",
    "LoadError": "anyrank.errors",
    "LoadPlan": "anyrank.filling.plan",
    "LoadReport": "anyrank.filling.report",
    "Offload": "anyrank.memory.offload",
    "OffloadStats": "anyrank.memory.offload",
    "Pack": "anyrank.around.streams.transforms",
    "RankError": "anyrank.errors",
    "RecomputeError": "anyrank.errors",
    "ResumeReport": "anyrank.state.resume_report",
    "Sync": "anyrank.around.sync.sync",
    "SyncReport": "anyrank.around.sync.report",
    "TrainState": "anyrank.state.train_state",
    "UnsafeFile": "anyrank.errors",
    "check": "anyrank.watching.check",
    "convert": "anyrank.around.conversion.convert",
    "diff": "anyrank.around.inspection.diff",
    "freeze": "anyrank.around.frozen.freeze",
    "inspect": "anyrank.around.inspection.inspect",
    "load": "anyrank.filling.load",
    "materialize": "anyrank.around.first_values.materialize",
    "meta": "anyrank.filling.meta",
    "plan": "anyrank.filling.plan",
    "recompute": "anyrank.memory.recompute",
    "recompute_": "anyrank.memory.patch",
    "row_counts": "anyrank.around.streams.row_counts",
    "cpu_only": "anyrank.around.frozen.cpu_only",
    "sync": "anyrank.around.sync.sync",
    "tile": "anyrank.memory.tile",
    "tile_": "anyrank.memory.patch",
    "tiled_loss": "anyrank.memory.loss",
    "verify": "anyrank.around.inspection.verify",
    "__version__": "anyrank.versions",
    "watch": "anyrank.watching.hang",
}

# Hidden from type checkers, which read the imports above: a misspelt name stays an error to them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module that defines a public name, and keep the name here."""
        if name == "integrations":  # a package, which sets itself as an attribute here
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
    """The public names only."""
    return list(__all__)
